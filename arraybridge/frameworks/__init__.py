"""One room per framework; see `base.Framework` for the questions that each answers."""

"""How an array travels from one framework to another."""

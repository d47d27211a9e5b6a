"""The tests of arraybridge."""

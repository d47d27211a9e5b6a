"""Scripts that the tests beside run in processes of their own."""

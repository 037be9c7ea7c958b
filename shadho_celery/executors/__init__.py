"""Ways of getting trials run."""

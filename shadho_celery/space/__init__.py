"""What is searched: `domains` (a leaf's law), `compile` (hyperopt's expression to a `Space`), `split` (subspaces)."""

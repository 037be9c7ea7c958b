"""Other tools: trackers, callbacks of training frameworks, scikit-learn's search, Hydra's sweeps.

Each module is named after the package that it serves, needs the extra of that name and nothing of the other modules.
Nothing in this project imports them except by name, when a user asks for one. `callbacks` has what the callbacks of all
frameworks share.
"""

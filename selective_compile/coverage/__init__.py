"""The sweep over every model type of the installed transformers: `selective-compile coverage`."""

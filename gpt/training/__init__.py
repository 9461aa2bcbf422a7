"""A run: its settings, corpus, optimizer, processes, folder and checkpoints. It uses the model; scripts use it."""

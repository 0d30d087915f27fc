"""The rooms behind `train_lm.py`: the text, the model, the training loop, what it prints and draws."""

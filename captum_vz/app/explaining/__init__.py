"""One text, image or sound explained: what the model predicts, the rows that explain it, their pictures."""

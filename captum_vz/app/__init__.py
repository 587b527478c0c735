"""What the command line and the demo share: models by their names, one text explained, its pictures and its page."""

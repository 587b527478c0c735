"""Sentences to train on and to measure with: BLiMP, and a grammar of number agreement."""

"""Sentences and texts, and how a tokenizer's tokens stand for their words."""

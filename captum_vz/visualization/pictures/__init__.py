"""Figures of maps and scores, their descriptions, and what their files say about their origin."""

"""Captum's own pieces on our classes, and Captum's rules: what a user of Captum may rely on without a manual."""

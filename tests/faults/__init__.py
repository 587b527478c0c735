"""Errors, interruptions, threads and repetition leave the model, torch and the process as they were."""

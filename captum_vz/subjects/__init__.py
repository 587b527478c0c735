"""What is explained: a model by its name, its folder or as an object, and what makes its inputs.

subject_of     the model that a user passes, with its tokenizer and its layers
model_sources  the models of a study
"""

from captum_vz.subjects.subject import Subject, check_order, model_sources, parts_of, subject_of, text_subject_of

__all__ = ["Subject", "check_order", "model_sources", "parts_of", "subject_of", "text_subject_of"]

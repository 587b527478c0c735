"""Methods: who asks one question about a text, or one for each example of a batch, gets scores by one verb.

`method.scores(subject, question, features)` runs any method on any model: raw scores with their signs. `shares` makes
shares of them.
"""

from captum_vz._names import COMPARED_METHODS, DEFAULT_METHODS
from captum_vz.methods.given import Batch, as_method, given_methods, load_plugin, name_of, register_method
from captum_vz.methods.method import Method, Question, check_layer, checked_shares, residual_text, shares
from captum_vz.methods.registry import DECIDING, DECISION, DEEP, MAPS, METHODS, joined_first, rollout_of

__all__ = [
    "COMPARED_METHODS",
    "DECIDING",
    "DECISION",
    "DEEP",
    "DEFAULT_METHODS",
    "MAPS",
    "METHODS",
    "Batch",
    "Method",
    "Question",
    "as_method",
    "check_layer",
    "checked_shares",
    "given_methods",
    "joined_first",
    "load_plugin",
    "name_of",
    "register_method",
    "residual_text",
    "rollout_of",
    "shares",
]

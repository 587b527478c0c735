"""From the words of a sentence to the tokens of a tokenizer."""

from captum_vz.text.lines import read_json_lines
from captum_vz.text.records import EncodedRecord, encode_record, form_ids, record_spans
from captum_vz.text.words import MASK, Record, split_words, word_spans

__all__ = [
    "MASK",
    "EncodedRecord",
    "Record",
    "encode_record",
    "form_ids",
    "read_json_lines",
    "record_spans",
    "split_words",
    "word_spans",
]

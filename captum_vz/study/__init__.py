"""Many methods on many sentences."""

from captum_vz.study.example import Example, read_jsonl, write_jsonl

__all__ = ["Example", "read_jsonl", "write_jsonl"]

"""The metadata is in setup.cfg, except for the description: the page of an index cannot follow relative links."""

import re
from pathlib import Path

from setuptools import setup

RELATIVE = r"\[([^\]]*)\]\((?!https?:)[^)]*\)"  # a link of Markdown to a file of the repository
readme = Path(__file__).with_name("README.md").read_text("utf-8")
without_pictures = re.sub(f"!{RELATIVE}\\n*", "", readme)

setup(
    long_description=re.sub(RELATIVE, r"\1", without_pictures),
    long_description_content_type="text/markdown",
)

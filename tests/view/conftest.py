"""The pages that a test opens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.view.pages import Open, context_of, ready


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """A function that opens a document. The test fails if the page has an error or asks for anything else."""
    contexts, wrong = [], []

    def open_document(document: str, wait: bool = True, **options: Any) -> Any:
        path = tmp_path / f"page{len(contexts)}.html"
        path.write_bytes(document.encode("latin-1"))
        context = context_of(browser, **{"viewport": {"width": 1000, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        own = path.as_uri()
        page.on("request", lambda request: request.url in (own, "about:srcdoc") or wrong.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
        page.goto(own)
        return ready(page) if wait else page

    yield open_document
    for context in contexts:
        context.close()
    assert not wrong

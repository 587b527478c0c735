"""A page in the browser that explains texts: `captum-vz demo`. It needs the extra `demo`."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
from collections.abc import Sequence

from captum_vz.demo.answers import Answers, Limits
from captum_vz.demo.page import build, look
from captum_vz.errors import ArgumentError
from captum_vz.subjects.loading import AGREEMENT, CAUSAL, MINILM, find_models

__all__ = ["serve"]


def serve(
    models: Sequence[str] = (),
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    max_tokens: int = 128,
    open_browser: bool = False,
) -> None:
    """Serve the page until Ctrl-C.

    No request leaves the machine: Gradio's analytics are off, fonts come from the system, and models are not
    downloaded. At an address that other machines reach, visitors can choose among the offered models only.

    Args:
        models: Further models that the page offers: folders, or ids that the Hugging Face cache holds.
        host: The address.
        port: The port. None: the first free one from 7860.
        max_tokens: The most tokens of a text.
        open_browser: Whether to open the page in a browser.

    Raises:
        ModuleNotFoundError: Gradio is not installed.
        ArgumentError: There is no such model, the port is taken, or the address is not of this machine.
    """
    check_address(host, port)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before the import, which reads it
    try:
        import gradio as gr
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('the demo needs gradio: pip install "captum-vz[demo]"') from error
    find_models(models, hub=False)
    offered = tuple(dict.fromkeys((AGREEMENT, CAUSAL, MINILM, *models)))
    answers = Answers(Limits(offered, is_loopback(host), max_tokens))
    page = build(answers)
    page.queue(max_size=20, default_concurrency_limit=1)
    try:
        _, url, _ = page.launch(
            server_name=f"[{host}]" if ":" in host else host,  # an address of IPv6
            server_port=port,
            inbrowser=open_browser,
            share=False,
            quiet=True,
            footer_links=[],
            enable_monitoring=False,
            ssr_mode=False,
            prevent_thread_lock=True,
            **look(gr),
        )
        print(f"{url}\nCtrl-C ends the demo.", flush=True)
        threading.Event().wait()
    except OSError as error:  # all ports are taken, or one was taken just now
        raise ArgumentError(f"cannot serve at {host}, port {port or 'from 7860'}: {error}") from error
    finally:
        page.close(verbose=False)
        answers.close()


def check_address(host: str, port: int | None) -> None:
    """Refuse an address at which this machine cannot serve. Gradio would try a hundred ports for a minute.

    >>> check_address("127.0.0.1", None)
    >>> check_address("127.0.0.1", 99999)
    Traceback (most recent call last):
    ...
    captum_vz.errors.ArgumentError: port 99999 is out of range: pass 1 to 65535.
    """
    if port is not None and not 1 <= port <= 65535:
        raise ArgumentError(f"port {port} is out of range: pass 1 to 65535.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except (OSError, UnicodeError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise ArgumentError(f"port {port} of {host} is taken: pass another port, or none.") from error
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(f"cannot serve at {host}: {reason}. Pass an address of this machine.") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

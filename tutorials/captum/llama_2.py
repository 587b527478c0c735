"""Generated text: the calls of Captum's tutorial "Understanding Llama2 with Captum LLM Attribution", in its order.

https://captum.ai/tutorials/Llama2_LLM_Attribution
"""

import torch
from captum.attr import (
    FeatureAblation,
    LayerIntegratedGradients,
    LLMAttribution,
    LLMGradientAttribution,
    ProductBaselines,
    ShapleyValueSampling,
    TextTemplateInput,
    TextTokenInput,
)

from captum_vz.testbed import load_model

torch.manual_seed(0)
model, tokenizer = load_model("causal")
eval_prompt = "the pictures of some hat"
model_input = tokenizer(eval_prompt, return_tensors="pt")
with torch.no_grad():
    output_ids = model.generate(model_input["input_ids"], max_new_tokens=3, do_sample=False)[0]
print(tokenizer.decode(output_ids, skip_special_tokens=True))

# Which tokens of the prompt the answer depends on.
fa = FeatureAblation(model)
llm_attr = LLMAttribution(fa, tokenizer)
skip_tokens = tokenizer.all_special_ids
inp = TextTokenInput(eval_prompt, tokenizer, skip_tokens=skip_tokens)
target = "have upset anna"
attr_res = llm_attr.attribute(inp, target=target, skip_tokens=skip_tokens)
print("attr to the output sequence:", attr_res.seq_attr.shape)
print("attr to the output tokens:", attr_res.token_attr.shape)
figure, axes = attr_res.plot_token_attr()

# Which words of a template.
inp = TextTemplateInput(template="the {} of some {}", values=["pictures", "hat"])
attr_res = llm_attr.attribute(inp, target=target, skip_tokens=skip_tokens)
figure, axes = attr_res.plot_token_attr()

# Baselines of the words, named values, and words that belong together.
inp = TextTemplateInput(
    template="the {thing} of {number} {other}",
    values={"thing": "pictures", "number": "some", "other": "hat"},
    baselines={"thing": "reports", "number": "the", "other": "jar"},
    mask={"thing": 0, "number": 1, "other": 1},
)
attr_res = llm_attr.attribute(inp, target=target, skip_tokens=skip_tokens)
print("attr to the output sequence:", attr_res.seq_attr.shape)

# Shapley values of the words, with baselines that are drawn together.
baselines = ProductBaselines({"thing": ["reports", "stories"], "other": ["jar", "book"]})
inp = TextTemplateInput(
    template="the {thing} of some {other}", values={"thing": "pictures", "other": "hat"}, baselines=baselines
)
svs = ShapleyValueSampling(model)
shapley = LLMAttribution(svs, tokenizer)
attr_res = shapley.attribute(inp, target=target, num_trials=2, n_samples=4)
print("attr to the output sequence:", attr_res.seq_attr.shape)

# Gradients of the embedding.
lig = LayerIntegratedGradients(model, model.model.embed_tokens)
llm_grad = LLMGradientAttribution(lig, tokenizer)
inp = TextTokenInput(eval_prompt, tokenizer, skip_tokens=skip_tokens)
attr_res = llm_grad.attribute(inp, target=target, n_steps=10)
figure, axes = attr_res.plot_seq_attr()

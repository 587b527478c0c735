"""Questions about images: the calls of Captum's tutorial "Interpreting multimodal models: VQA", in its order.

https://captum.ai/tutorials/Multimodal_VQA_Interpret

The tutorial's model is a ResNet with a recurrent network. A small ViLT takes its place, which has attention over words
and patches.
"""

import numpy as np
import torch
from captum.attr import (
    IntegratedGradients,
    TokenReferenceBase,
    configure_interpretable_embedding_layer,
    remove_interpretable_embedding_layer,
)
from captum.attr import visualization as viz
from transformers import ViltConfig, ViltForQuestionAnswering

from captum_vz.testbed import load_model

_, tokenizer = load_model()
torch.manual_seed(0)
config = ViltConfig(
    vocab_size=len(tokenizer),
    image_size=32,
    patch_size=8,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_labels=5,
)
vqa = ViltForQuestionAnswering(config).eval()
token_reference = TokenReferenceBase(reference_token_idx=tokenizer.pad_token_id)
image = torch.zeros(1, 3, 32, 32)
image[0, 0, 8:24, 8:24] = 1


# ViLT draws the order of the patches in each call. This puts them line by line.
drawn_embed = vqa.vilt.embeddings.visual_embed


def visual_embed(*args, **kwargs):
    embedded, mask, (places, grid) = drawn_embed(*args, **kwargs)
    order = (places[0] @ torch.tensor([grid[1], 1])).argsort()
    kept = torch.cat([torch.zeros(1, dtype=torch.long), order + 1])  # [CLS] stays the first
    return embedded[:, kept], mask[:, kept], (places[:, order], grid)


vqa.vilt.embeddings.visual_embed = visual_embed


def model(question, pixels):
    return vqa(input_ids=question, pixel_values=pixels).logits


def model_of_embeddings(question, pixels):
    return vqa(inputs_embeds=question, pixel_values=pixels).logits


def vqa_interpret(image, question):
    tokens = tokenizer.tokenize(question)
    q_input = torch.tensor([tokenizer.convert_tokens_to_ids(tokens)])
    interpretable_embedding = configure_interpretable_embedding_layer(
        vqa, "vilt.embeddings.text_embeddings.word_embeddings"
    )
    q_input_embedding = interpretable_embedding.indices_to_embeddings(q_input)
    q_reference = token_reference.generate_reference(len(tokens), device="cpu").unsqueeze(0)
    q_baseline = interpretable_embedding.indices_to_embeddings(q_reference)
    remove_interpretable_embedding_layer(vqa, interpretable_embedding)
    pred, answer_idx = model(q_input, image).softmax(1).max(1)

    ig = IntegratedGradients(model_of_embeddings)
    attributions = ig.attribute(
        inputs=(q_input_embedding, image), baselines=(q_baseline, image * 0), target=answer_idx, n_steps=20
    )
    text_attributions = attributions[0].sum(dim=2).squeeze(0)
    text_attributions = text_attributions / torch.norm(text_attributions)
    label = config.id2label[answer_idx.item()]
    record = viz.VisualizationDataRecord(
        text_attributions.detach(), pred.item(), label, label, label, text_attributions.sum(), tokens, 0.0
    )
    viz.visualize_text([record])
    heat = np.transpose(attributions[1].squeeze(0).detach().numpy(), (1, 2, 0))
    pixels = np.transpose(image.squeeze(0).numpy(), (1, 2, 0))
    methods, signs = ["original_image", "heat_map"], ["all", "positive"]
    viz.visualize_image_attr_multiple(heat, pixels, methods, signs, use_pyplot=False)


vqa_interpret(image, "the story of some hat")
vqa_interpret(image, "the pictures of the hat")

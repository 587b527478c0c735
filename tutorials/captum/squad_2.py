"""Attention: the calls of Captum's tutorial "Interpreting BERT Models (Part 2)", in its order.

https://captum.ai/tutorials/Bert_SQUAD_Interpret2

The tutorial takes attention from the layers of BERT, which do not return it since transformers 5. Here
`LayerConductance` looks at their attention modules.
"""

import matplotlib.pyplot as plt
import torch
from captum.attr import (
    LayerActivation,
    LayerConductance,
    configure_interpretable_embedding_layer,
    remove_interpretable_embedding_layer,
)
from transformers import BertForQuestionAnswering

from captum_vz.testbed import load_model

torch.manual_seed(0)
trained, tokenizer = load_model()
model = BertForQuestionAnswering(trained.config).eval()
model.bert.load_state_dict(trained.bert.state_dict())
model.set_attn_implementation("eager")
model.config.output_attentions = True
layers, heads = model.bert.encoder.layer, model.config.num_attention_heads


def predict(inputs, token_type_ids=None, position_ids=None, attention_mask=None):
    return model(inputs, token_type_ids=token_type_ids, position_ids=position_ids, attention_mask=attention_mask)


def squad_pos_forward_func(inputs, token_type_ids=None, position_ids=None, attention_mask=None, position=0):
    found = predict(inputs, token_type_ids, position_ids, attention_mask)
    return found[position].max(1).values


question, text = "the pictures of some hat", "marcus is scaring anna."
encoding = tokenizer(question, text, return_tensors="pt", return_token_type_ids=True)
input_ids, token_type_ids = encoding["input_ids"], encoding["token_type_ids"]
attention_mask = torch.ones_like(input_ids)
position_ids = torch.arange(input_ids.shape[1])[None]
special = torch.isin(input_ids, torch.tensor(tokenizer.all_special_ids))
ref_input_ids = input_ids.where(special, tokenizer.pad_token_id)
all_tokens = tokenizer.convert_ids_to_tokens(input_ids[0].tolist())
found = predict(input_ids, token_type_ids, position_ids, attention_mask)
print("Predicted answer:", all_tokens[found.start_logits.argmax() : found.end_logits.argmax() + 1])

# (layer, batch, head, token, token)
output_attentions_all = torch.stack(found.attentions)


def visualize_token2token_scores(scores_mat, x_label_name="Head"):
    figure, axes = plt.subplots(1, len(scores_mat), figsize=(4 * len(scores_mat), 4), squeeze=False)
    for index, (scores, panel) in enumerate(zip(scores_mat, axes[0], strict=True)):
        panel.imshow(scores.detach(), cmap="viridis")
        panel.set_xticks(range(len(all_tokens)), all_tokens, rotation=90)
        panel.set_yticks(range(len(all_tokens)), all_tokens)
        panel.set_xlabel(f"{x_label_name} {index + 1}")
    plt.close(figure)
    return figure


# The attention of the heads of one layer, and the norm over the heads of each layer.
layer = len(layers) - 1
visualize_token2token_scores(output_attentions_all[layer, 0])
visualize_token2token_scores(output_attentions_all[:, 0].norm(dim=1), "Layer")

# How much each attention weight adds to the score of the start.
interpretable_embedding = configure_interpretable_embedding_layer(model, "bert.embeddings")
input_embeddings = interpretable_embedding.indices_to_embeddings(
    input_ids, token_type_ids=token_type_ids, position_ids=position_ids
)
ref_input_embeddings = interpretable_embedding.indices_to_embeddings(
    ref_input_ids, token_type_ids=token_type_ids, position_ids=position_ids
)
layer_attn_mat_start = []
for one in layers:
    lc = LayerConductance(squad_pos_forward_func, one.attention.self)
    layer_attributions_start = lc.attribute(
        inputs=input_embeddings,
        baselines=ref_input_embeddings,
        additional_forward_args=(token_type_ids, position_ids, attention_mask, 0),
        n_steps=20,
    )
    layer_attn_mat_start.append(layer_attributions_start[1])
layer_attn_mat_start = torch.stack(layer_attn_mat_start)
visualize_token2token_scores(layer_attn_mat_start[layer, 0])
visualize_token2token_scores(layer_attn_mat_start[:, 0].norm(dim=1), "Layer")

# The norms of the value vectors, as they are and weighted by attention (Kobayashi et al. 2020).
la = LayerActivation(squad_pos_forward_func, [one.attention.self.value for one in layers])
more = (token_type_ids, position_ids, attention_mask)
values = torch.stack(la.attribute(input_embeddings, additional_forward_args=more))
values = values.unflatten(-1, (heads, -1)).transpose(2, 3)
dense = torch.stack([one.attention.output.dense.weight.unflatten(1, (heads, -1)) for one in layers])
f_x = torch.einsum("lbhjv,lohv->lbhjo", values, dense)
f_x_norm = f_x.norm(dim=-1)
alpha_f_x = torch.einsum("lbhij,lbhjo->lbhijo", output_attentions_all, f_x)
alpha_f_x_norm = alpha_f_x.norm(dim=-1)
visualize_token2token_scores(alpha_f_x_norm[layer, 0])
summed_alpha_f_x_norm = alpha_f_x.sum(dim=2).norm(dim=-1)
visualize_token2token_scores(summed_alpha_f_x_norm[:, 0], "Layer")
remove_interpretable_embedding_layer(model, interpretable_embedding)

"""Question answering: the calls of Captum's tutorial "Interpreting BERT Models (Part 1)", in its order.

https://captum.ai/tutorials/Bert_SQUAD_Interpret
"""

import matplotlib.pyplot as plt
import torch
from captum.attr import (
    LayerConductance,
    LayerIntegratedGradients,
    configure_interpretable_embedding_layer,
    remove_interpretable_embedding_layer,
)
from captum.attr import visualization as viz
from transformers import BertForQuestionAnswering

from captum_vz.testbed import load_model

torch.manual_seed(0)
trained, tokenizer = load_model()
model = BertForQuestionAnswering(trained.config).eval()
model.bert.load_state_dict(trained.bert.state_dict())


# The scores of the first token of the answer (position 0) or of its last token (position 1).
def predict(inputs, token_type_ids=None, position_ids=None, attention_mask=None):
    return model(inputs, token_type_ids=token_type_ids, position_ids=position_ids, attention_mask=attention_mask)


def squad_pos_forward_func(inputs, token_type_ids=None, position_ids=None, attention_mask=None, position=0):
    found = predict(inputs, token_type_ids, position_ids, attention_mask)
    return found[position].max(1).values


# A question, a text, and a reference of the same length with padding in the place of words.
question, text = "the pictures of some hat", "marcus is scaring anna."
encoding = tokenizer(question, text, return_tensors="pt", return_token_type_ids=True)
input_ids, token_type_ids = encoding["input_ids"], encoding["token_type_ids"]
attention_mask = torch.ones_like(input_ids)
position_ids = torch.arange(input_ids.shape[1])[None]
special = torch.isin(input_ids, torch.tensor(tokenizer.all_special_ids))
ref_input_ids = input_ids.where(special, tokenizer.pad_token_id)
all_tokens = tokenizer.convert_ids_to_tokens(input_ids[0].tolist())
start_scores, end_scores = predict(input_ids, token_type_ids, position_ids, attention_mask).to_tuple()
print("Predicted answer:", all_tokens[start_scores.argmax() : end_scores.argmax() + 1])


def summarize_attributions(attributions):
    attributions = attributions.sum(dim=-1).squeeze(0)
    return attributions / torch.norm(attributions)


def record_of(attributions, scores, delta):
    best = scores.argmax().item()
    chance = scores.softmax(1).max()
    total = attributions.sum()
    return viz.VisualizationDataRecord(attributions, chance, best, best, str(best), total, all_tokens, delta)


# Which words decide where the answer begins and ends.
lig = LayerIntegratedGradients(squad_pos_forward_func, model.bert.embeddings)
records = []
for position, scores in enumerate((start_scores, end_scores)):
    more = (token_type_ids, position_ids, attention_mask, position)
    attributions, delta = lig.attribute(
        inputs=input_ids,
        baselines=ref_input_ids,
        additional_forward_args=more,
        n_steps=20,
        return_convergence_delta=True,
    )
    records.append(record_of(summarize_attributions(attributions), scores, delta))
page = viz.visualize_text(records)

# The same for words, token types and positions.
parts = model.bert.embeddings
embeddings = [parts.word_embeddings, parts.token_type_embeddings, parts.position_embeddings]
lig2 = LayerIntegratedGradients(squad_pos_forward_func, embeddings)
of_parts = lig2.attribute(
    inputs=(input_ids, token_type_ids, position_ids),
    baselines=(ref_input_ids, torch.zeros_like(token_type_ids), torch.zeros_like(position_ids)),
    additional_forward_args=(attention_mask, 0),
    n_steps=20,
)
for name, attributions in zip(("words", "token types", "positions"), of_parts, strict=True):
    best = summarize_attributions(attributions).topk(3).indices.tolist()
    print("Most of the start, by", name, [all_tokens[index] for index in best])

# Which tokens each layer uses for the start.
interpretable_embedding = configure_interpretable_embedding_layer(model, "bert.embeddings")
input_embeddings = interpretable_embedding.indices_to_embeddings(
    input_ids, token_type_ids=token_type_ids, position_ids=position_ids
)
ref_input_embeddings = interpretable_embedding.indices_to_embeddings(
    ref_input_ids, token_type_ids=token_type_ids, position_ids=position_ids
)
layer_attrs_start = []
for layer in model.bert.encoder.layer:
    lc = LayerConductance(squad_pos_forward_func, layer)
    layer_attributions = lc.attribute(
        inputs=input_embeddings,
        baselines=ref_input_embeddings,
        additional_forward_args=(token_type_ids, position_ids, attention_mask, 0),
        n_steps=20,
    )
    found = layer_attributions[0] if isinstance(layer_attributions, tuple) else layer_attributions
    layer_attrs_start.append(summarize_attributions(found).detach())
remove_interpretable_embedding_layer(model, interpretable_embedding)

figure, axes = plt.subplots()
axes.imshow(torch.stack(layer_attrs_start), aspect="auto")
axes.set_xticks(range(len(all_tokens)), all_tokens, rotation=90)
axes.set_ylabel("layer")

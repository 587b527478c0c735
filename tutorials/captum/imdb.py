"""Sentiment: the calls of Captum's tutorial "Interpreting text models: IMDB sentiment analysis", in its order.

https://captum.ai/tutorials/IMDB_TorchText_Interpret

The tutorial's classifier is a convolution, which has no attention. A small Transformer takes its place.
"""

import torch
from captum.attr import LayerIntegratedGradients, TokenReferenceBase, visualization
from torch import nn

from captum_vz.testbed import load_model

_, tokenizer = load_model()
PAD_IND = tokenizer.pad_token_id


class Classifier(nn.Module):
    """One number for each text, the mean over all tokens."""

    def __init__(self, vocabulary, size=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size, padding_idx=PAD_IND)
        block = nn.TransformerEncoderLayer(size, 4, 32, dropout=0, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, num_layers=2)
        self.fc = nn.Linear(size, 1)

    def forward(self, text):
        return self.fc(self.encoder(self.embedding(text)).mean(1))


torch.manual_seed(0)
model = Classifier(len(tokenizer)).eval()
token_reference = TokenReferenceBase(reference_token_idx=PAD_IND)


def forward_with_sigmoid(text):
    return torch.sigmoid(model(text))[:, 0]


lig = LayerIntegratedGradients(forward_with_sigmoid, model.embedding)
vis_data_records = []


def interpret_sentence(sentence, min_len=7, label=0):
    tokens = tokenizer.tokenize(sentence)
    tokens += [tokenizer.pad_token] * (min_len - len(tokens))
    input_indices = torch.tensor([tokenizer.convert_tokens_to_ids(tokens)])
    pred = forward_with_sigmoid(input_indices).item()
    reference_indices = token_reference.generate_reference(len(tokens), device="cpu").unsqueeze(0)
    attributions, delta = lig.attribute(input_indices, reference_indices, n_steps=50, return_convergence_delta=True)
    attributions = attributions.sum(dim=2).squeeze(0)
    add_attributions_to_visualizer(attributions, tokens, pred, label, delta)


def add_attributions_to_visualizer(attributions, tokens, pred, label, delta):
    attributions = (attributions / torch.norm(attributions)).detach().numpy()
    names = ["negative", "positive"]
    total = attributions.sum()
    record = visualization.VisualizationDataRecord(
        attributions, pred, names[round(pred)], names[label], names[1], total, tokens, delta
    )
    vis_data_records.append(record)


interpret_sentence("the pictures of some hat have upset anna", label=1)
interpret_sentence("the story is scaring marcus", label=0)
page = visualization.visualize_text(vis_data_records)

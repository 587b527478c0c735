"""Several processes: the calls of Captum's tutorial "Distributed computation of attributions", in its order.

https://captum.ai/tutorials/Distributed_Attribution

Each process explains a part of a batch, and the first one gathers the attributions. A small BERT takes the place of the
tutorial's toy model.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from captum.attr import LayerIntegratedGradients
from torch import nn
from torch.multiprocessing import Process
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

from captum_vz.testbed import load_model

WORLD_SIZE = 2
_, tokenizer = load_model()
sentences = ["the pictures of some hat", "the story of the jar", "every book of anna is", "some essay of the table"]
batch = tokenizer(sentences, return_tensors="pt")["input_ids"]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            attn_implementation="eager",
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, ids):
        return self.bert(ids).logits


def explain(model, inp_batch):
    inner = getattr(model, "module", model)
    lig = LayerIntegratedGradients(model, inner.bert.get_input_embeddings())
    return lig.attribute(inp_batch, target=0, n_steps=10).sum(-1)


def run(rank, size, inp_batch):
    torch.set_num_threads(1)
    model = DistributedDataParallel(Classifier().eval())
    attr = explain(model, inp_batch)
    if rank == 0:
        output_list = [torch.zeros_like(attr) for _ in range(size)]
        dist.gather(attr, gather_list=output_list)
        combined_attr = torch.cat(output_list)
        print(combined_attr)
        assert torch.allclose(combined_attr, explain(Classifier().eval(), batch), atol=1e-5)
    else:
        dist.gather(attr)


def init_process(rank, size, function, inp_batch, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    function(rank, size, inp_batch)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank, inp_batch in enumerate(batch.chunk(WORLD_SIZE)):
            arguments = (rank, WORLD_SIZE, run, inp_batch, os.path.join(folder, "meeting"))
            processes.append(Process(target=init_process, args=arguments))
            processes[-1].start()
        for process in processes:
            process.join()
            assert process.exitcode == 0

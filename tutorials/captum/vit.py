"""Images: the calls of Captum's tutorial "Interpreting vision with ResNet", in its order, on a small ViT.

https://captum.ai/tutorials/Resnet_TorchVision_Interpret

The tutorial's ResNet has no attention. A ViT takes its place, and a drawn square that of the photograph.
"""

import numpy as np
import torch
from captum.attr import GradientShap, IntegratedGradients, NoiseTunnel, Occlusion
from captum.attr import visualization as viz
from transformers import ViTConfig, ViTForImageClassification

torch.manual_seed(0)
config = ViTConfig(
    image_size=32,
    patch_size=8,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_labels=5,
)
classifier = ViTForImageClassification(config).eval()


def model(pixels):
    return classifier(pixels).logits


transformed_img = torch.zeros(3, 32, 32)
transformed_img[0, 8:24, 8:24] = 1
input = (transformed_img - 0.5) / 0.5
input = input.unsqueeze(0)
output = model(input).softmax(1)
prediction_score, pred_label_idx = output.topk(1)
pred_label_idx = pred_label_idx.squeeze(1)
print("Predicted:", config.id2label[pred_label_idx.item()], f"({prediction_score.item():.2f})")


def show(attributions, methods=("original_image", "heat_map"), signs=("all", "positive")):
    heat = np.transpose(attributions.squeeze(0).detach().numpy(), (1, 2, 0))
    pixels = np.transpose(transformed_img.numpy(), (1, 2, 0))
    return viz.visualize_image_attr_multiple(heat, pixels, methods, signs, use_pyplot=False)


integrated_gradients = IntegratedGradients(model)
show(integrated_gradients.attribute(input, target=pred_label_idx, n_steps=20))

noise_tunnel = NoiseTunnel(integrated_gradients)
attributions = noise_tunnel.attribute(input, nt_samples=3, nt_type="smoothgrad_sq", target=pred_label_idx, n_steps=10)
show(attributions)

gradient_shap = GradientShap(model)
rand_img_dist = torch.cat([input * 0, input * 1])
attributions = gradient_shap.attribute(
    input, n_samples=5, stdevs=0.0001, baselines=rand_img_dist, target=pred_label_idx
)
show(attributions)

occlusion = Occlusion(model)
attributions = occlusion.attribute(
    input, strides=(3, 8, 8), target=pred_label_idx, sliding_window_shapes=(3, 15, 15), baselines=0
)
show(attributions)

"""Distillation between two small pretrained models, on real text: models and text come from package registries."""

"""Pretrained models: where real queries, keys and values come from, and where a linear method is put to work.

Importing this package imports neither transformers nor any model file; each function does so when it is called.
"""

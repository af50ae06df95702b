"""Text for language models: tokenizers, Megatron's token files, and documents packed into samples of one length.

Reading documents, tokenizing and writing (`prepare`) work without torch; what trains imports `trainers.data.text.build`.
"""

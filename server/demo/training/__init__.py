"""How the bundled demo model was made: corpus, tokenizer, target, EAGLE heads, export.

``python -m server.demo.training.run --help`` starts the whole of it.
"""

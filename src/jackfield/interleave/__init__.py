"""A block beside a forward pass: where tensors pass, whose rows they are, and who waits for them."""

"""What can be named: the values of the contract, the raw module tree, and how a family computes them."""

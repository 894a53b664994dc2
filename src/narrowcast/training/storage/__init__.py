"""In which formats training keeps weights, masters, gradients and moments, and what is lost by them."""

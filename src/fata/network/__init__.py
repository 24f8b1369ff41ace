"""What is known of any `nn.Module`: its layers, its parameters, its outputs, a tap into it."""

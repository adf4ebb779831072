"""xielu: an activation with trained slopes (arXiv 2411.13010).

x [..., D]; alpha_p, alpha_n, beta, eps [1] -> out [..., D]: beta * x + softplus(alpha_p) * x * x where x > 0,
else beta * x + (beta + softplus(alpha_n)) * (expm1(min(x, eps)) - x). Computed in float32, rounded once.
"""

from tapeout.plugins.op import OpSchema

SCHEMA = OpSchema("xielu", inputs=("x",), weights=("alpha_p", "alpha_n", "beta", "eps"))

/* The named activation functions on eight lanes; codes as in activation/codes.py. */
#ifndef TAPEOUT_ACTIVATION_H
#define TAPEOUT_ACTIVATION_H

#include "../native/common.h"

enum { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, TANH = 4, SIGMOID = 5, RELU2 = 6, QUICK_GELU = 7, SOFTPLUS = 8 };

INLINE v8f activate8(v8f x, int kind) {
    switch (kind) {
    case SILU: return x / (splat(1.0f) + exp8(-x));
    case GELU: {
        v8f scaled = x * splat(0.70710678f);
        for (int i = 0; i < 8; i++) scaled[i] = erff(scaled[i]);
        return x * splat(0.5f) * (splat(1.0f) + scaled);
    }
    case GELU_TANH: {
        v8f inner = splat(0.79788456f) * (x + splat(0.044715f) * x * x * x);
        return splat(0.5f) * x * (splat(1.0f) + tanh8(inner));
    }
    case RELU: return select8(x < splat(0), splat(0), x);
    case TANH: return tanh8(x);
    case RELU2: {
        v8f kept = select8(x < splat(0), splat(0), x);
        return kept * kept;
    }
    case QUICK_GELU: return x / (splat(1.0f) + exp8(splat(-1.702f) * x));
    case SOFTPLUS: {
        v8f soft = x;
        for (int i = 0; i < 8; i++) soft[i] = x[i] > 20.0f ? x[i] : log1pf(expf(x[i]));
        return soft;
    }
    default: return splat(1.0f) / (splat(1.0f) + exp8(-x));
    }
}

#endif

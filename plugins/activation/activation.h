/* The named activation functions on eight lanes; codes as in activation/codes.py. */
#ifndef TAPEOUT_ACTIVATION_H
#define TAPEOUT_ACTIVATION_H

#include "../native/common.h"

enum { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, TANH = 4, SIGMOID = 5 };

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
    default: return splat(1.0f) / (splat(1.0f) + exp8(-x));
    }
}

#endif

// The instruction sets that the CPU backend is compiled for; include it before any Highway header.
//
// Highway compiles a source once for each target and chooses at run time, so a library built for
// plain x86-64 uses AVX2 or AVX-512 where the processor has them.
#pragma once

// A fused multiply-add rounds once, a multiply and an add round twice. The product of two bf16 is
// exact in fp32, so the two differ only where that product alone would overflow or underflow; the
// promise of equal bits makes no exception there. Only targets with a fused instruction are
// compiled: SSSE3 and SSE4 have none, so processors older than AVX2 + FMA fall back to HWY_SCALAR,
// for which fma-inl.h spells std::fma: the same bits, very slowly. (Any other target without a
// fused instruction stops the build there.)
// SVE and RVV vectors have no compile-time size and so cannot be elements of an array, as the
// kernels need; 64-bit Arm uses NEON, which is fused.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
// The fallback is HWY_SCALAR, not HWY_EMU128, whose MulAdd is not fused.
#define HWY_BROKEN_EMU128 1

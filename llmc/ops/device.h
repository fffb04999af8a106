/*
The device of this build: the CPU's plain loops (-DGPT2_CPU) or CUDA. Both have the same names.

    #include "device.h"
    Stream stream = stream_create();
*/
#pragma once

#ifdef GPT2_CPU
#include "cpu_device.h"     // gives: Stream, Event, DeviceInfo, device_malloc, copy_to_host, the ops
#else
#include "cuda_device.h"    // gives: the same, without the ops
#endif

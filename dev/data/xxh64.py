"""XXH64 with seed 0, the checksum in headers of ours, as llmc/checksum.h computes it. Standard library only.

    sum = xxh64(data)           # 5 MB take a second: it is for files of that size
"""
import struct

ONE, TWO, THREE = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
FOUR, FIVE, MASK = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5, 2**64 - 1


def rotated(x, by):
    return (x << by | x >> 64 - by) & MASK


def mixed(lane, word):
    return rotated(lane + word * TWO & MASK, 31) * ONE & MASK


def xxh64(data):
    lanes, at, total = [ONE + TWO & MASK, TWO, 0, -ONE & MASK], len(data) // 32 * 32, FIVE
    for words in struct.iter_unpack("<4Q", data[:at]):
        lanes = list(map(mixed, lanes, words))
    if at:
        total = sum(map(rotated, lanes, (1, 7, 12, 18))) & MASK
        for lane in lanes:
            total = (total ^ mixed(0, lane)) * ONE + FOUR & MASK
    total = total + len(data) & MASK
    for size, factor, by, times, more in ((8, None, 27, ONE, FOUR), (4, ONE, 23, TWO, THREE),
                                          (1, FIVE, 11, ONE, 0)):
        while len(data) - at >= size:
            word = int.from_bytes(data[at:at + size], "little")
            word = mixed(0, word) if factor is None else word * factor & MASK
            total = rotated(total ^ word, by) * times + more & MASK
            at += size
    for by, factor in ((33, TWO), (29, THREE), (32, 1)):
        total = (total ^ total >> by) * factor & MASK
    return total

package wire

import (
	"google.golang.org/protobuf/encoding/protowire"
)

// Elements counts the elements of each repeated field of a message, from its bytes and without decoding it: so that a message of
// millions of empty elements is denied before they are allocated. It calls more with the number of a field and how many elements
// the next part of it has, at most; an error of more ends the count and is returned. A field whose wire type is bytes counts as
// packed where packed has its bit set: its elements are at most its bytes. Bytes that are no message are for the decoder to tell.
func Elements(data []byte, packed uint64, more func(field protowire.Number, n int) error) error {
	for len(data) > 0 {
		field, kind, n := protowire.ConsumeTag(data)
		if n < 0 {
			return nil
		}
		data = data[n:]
		count := 1
		if kind == protowire.BytesType && field < 64 && packed&(1<<field) != 0 {
			list, n := protowire.ConsumeBytes(data)
			if n < 0 {
				return nil
			}
			data, count = data[n:], varints(list)
		} else {
			n := protowire.ConsumeFieldValue(field, kind, data)
			if n < 0 {
				return nil
			}
			data = data[n:]
		}
		if err := more(field, count); err != nil {
			return err
		}
	}
	return nil
}

// varints counts the varints in a packed list.
func varints(list []byte) int {
	n := 0
	for _, b := range list {
		if b < 0x80 { // the last byte of one
			n++
		}
	}
	return n
}

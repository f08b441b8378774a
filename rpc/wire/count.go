package wire

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Parts counts what a message has allocated when it is decoded, from its bytes and without decoding it: the messages in it and the
// elements of lists and maps, at every depth. So a message of millions of empty elements is denied before they are allocated. Parts stops
// soon after it has counted more than most. Bytes that are no message are for the decoder to tell: what comes after them is not counted.
func Parts(d protoreflect.MessageDescriptor, data []byte, most int) (n int) {
	fields := d.Fields()
	for len(data) > 0 && n <= most {
		number, kind, size := protowire.ConsumeTag(data)
		if size < 0 {
			return n
		}
		data = data[size:]
		if size = protowire.ConsumeFieldValue(number, kind, data); size < 0 {
			return n
		}
		value := data[:size]
		data = data[size:]
		f := fields.ByNumber(number)
		if f == nil {
			continue
		}
		if kind == protowire.BytesType {
			value, _ = protowire.ConsumeBytes(value)
		}
		switch {
		case kind == protowire.BytesType && f.Message() != nil:
			n++
			// With nothing left to count it returns at once, however deep the messages are.
			n += Parts(f.Message(), value, most-n)
		case kind == protowire.BytesType && f.IsPacked():
			n += inPacked(f.Kind(), value)
		case f.IsList():
			n++
		}
	}
	return n
}

// inPacked counts the elements of a packed list.
func inPacked(kind protoreflect.Kind, list []byte) int {
	switch kind {
	case protoreflect.Fixed32Kind, protoreflect.Sfixed32Kind, protoreflect.FloatKind:
		return len(list) / 4
	case protoreflect.Fixed64Kind, protoreflect.Sfixed64Kind, protoreflect.DoubleKind:
		return len(list) / 8
	}
	return varints(list)
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

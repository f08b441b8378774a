package wire

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Parts counts in an encoded message, without decoding it, what a decoder would allocate: messages, and elements of
// lists and maps, at every depth. A decoder can reject a message of millions of empty elements that way before it
// allocates them. Parts stops soon after its count has passed most. It does not count beyond malformed bytes, because
// decoding fails there.
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
			// When the count has passed most, the call returns at once, so that the depth of recursion is bounded.
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

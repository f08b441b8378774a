// Package wire is how Weir's types become messages of gRPC, and messages bytes: conversions between limit's types and weir.v1, which
// both of its services and the client need, a codec that uses the marshalling generated for Weir's own messages, and the compact
// form that checks and decisions have in CheckStream.
//
// It keeps no state but that of one stream and decides nothing. What it does not promise: that text in a message is UTF-8,
// which the generated code does not look at; whoever uses a text checks it.
package wire

import (
	"fmt"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	// Registers gRPC's own codec, which carries what has no generated marshalling.
	standard "google.golang.org/grpc/encoding/proto"
)

// Codec returns gRPC's codec "proto" with the marshalling that is generated for Weir's messages; other messages, such as
// those of the health service, take gRPC's own way. It is given to a server (grpc.ForceServerCodecV2) or a connection
// (grpc.ForceCodecV2), and not registered, so that a program that links Weir's client keeps its own. The bytes are the
// same.
func Codec() encoding.CodecV2 {
	return CodecFrom(nil)
}

// maxForeign bounds the elements, as Parts counts them, of messages that the codec of a pool takes gRPC's own way: those of other
// services than Weir's, whose callers send as many as they like. They take some 10 MB when they are decoded.
const maxForeign = 1 << 16

// CodecFrom returns the same codec, which takes the bytes of all messages, small ones too, from a pool; nil stands for one of
// its own. With a pool, messages of other services that have more than 65,536 elements are not decoded.
func CodecFrom(pool mem.BufferPool) encoding.CodecV2 {
	if pool != nil {
		return codec{other: encoding.GetCodecV2(standard.Name), pool: pool, all: true}
	}
	// The sizes are powers of two, so that none takes more than twice what it needs: gRPC's own pool has none between 32 KiB and
	// 1 MiB, and sets to zero what it hands out, so that a message of 60 KB costs a megabyte of memory and of work.
	var err error
	pool, err = mem.NewBinaryTieredBufferPool(10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23)
	if err != nil { // on machines whose words cannot count to 8 MiB
		pool = mem.DefaultBufferPool()
	}
	return codec{other: encoding.GetCodecV2(standard.Name), pool: pool}
}

// CodecOf is Codec for messages of at most so many elements, counted as Parts does. Others are an error of Unmarshal, and are
// not decoded.
func CodecOf(elements int) encoding.CodecV2 {
	c := Codec().(codec)
	c.most = elements
	return c
}

type codec struct {
	other encoding.CodecV2
	pool  mem.BufferPool
	all   bool // messages are from the pool; otherwise small ones are not
	most  int  // elements of a message; 0: no bound
}

// message is what vtprotobuf generates.
type message interface {
	Reset()
	SizeVT() int
	MarshalToSizedBufferVT([]byte) (int, error)
	UnmarshalVT([]byte) error
}

// pooled is a message that keeps its room when it is reset.
type pooled interface {
	ResetVT()
}

// Recycled is a message whose memory is used again when it has been marshalled. Nobody may look at it afterwards.
type Recycled interface {
	Recycle()
}

// Lenient is a message that can always be decoded: what is wrong with it is kept in Err, and not returned, because gRPC
// answers a call by itself as soon as decoding fails, with INTERNAL.
type Lenient struct {
	Message proto.Message
	// Admit, when set, is given the message's size before anything else is done with it, and waits until it may be decoded. An
	// error of it is kept in Err, and nothing is decoded. It may set Message.
	Admit func(size int) error
	// Check, when set, is given the message's bytes before they are decoded. An error of it is kept in Err, and nothing is decoded.
	Check func([]byte) error
	Err   error // nil when the message is as sent
}

// Name implements encoding.CodecV2.
func (codec) Name() string { return standard.Name }

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	m, ok := v.(message)
	if !ok {
		return c.other.Marshal(v)
	}
	if r, ok := v.(Recycled); ok {
		defer r.Recycle()
	}
	size := m.SizeVT()
	if !c.all && mem.IsBelowBufferPoolingThreshold(size) {
		b := make([]byte, size)
		if _, err := m.MarshalToSizedBufferVT(b); err != nil {
			return nil, err
		}
		return mem.BufferSlice{mem.SliceBuffer(b)}, nil
	}
	b := c.pool.Get(size)
	if _, err := m.MarshalToSizedBufferVT(*b); err != nil {
		c.pool.Put(b)
		return nil, err
	}
	return mem.BufferSlice{mem.NewBuffer(b, c.pool)}, nil
}

// Unmarshal implements encoding.CodecV2. A message that keeps its room is decoded into the room it has.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	lenient, ok := v.(*Lenient)
	if !ok {
		return c.unmarshal(data, v, nil)
	}
	lenient.Err = nil
	if lenient.Admit != nil {
		lenient.Err = lenient.Admit(data.Len())
	}
	if lenient.Err == nil {
		lenient.Err = c.unmarshal(data, lenient.Message, lenient.Check)
	}
	return nil
}

func (c codec) unmarshal(data mem.BufferSlice, v any, check func([]byte) error) error {
	m, ok := v.(message)
	if !ok {
		if p, ok := v.(proto.Message); ok && c.all && data.Len() > maxForeign {
			b := data.MaterializeToBuffer(c.pool)
			defer b.Free()
			if Parts(p.ProtoReflect().Descriptor(), b.ReadOnlyData(), maxForeign) > maxForeign {
				return fmt.Errorf("a %T has more than %d elements", v, maxForeign)
			}
		}
		return c.other.Unmarshal(data, v)
	}
	if p, ok := v.(pooled); ok {
		p.ResetVT()
	} else {
		m.Reset()
	}
	b := data.MaterializeToBuffer(c.pool)
	defer b.Free() // the generated code copies what it keeps
	if check != nil {
		if err := check(b.ReadOnlyData()); err != nil {
			return err
		}
	}
	if p, ok := v.(proto.Message); ok && c.most > 0 && len(b.ReadOnlyData()) > c.most { // none takes less than a byte
		if Parts(p.ProtoReflect().Descriptor(), b.ReadOnlyData(), c.most) > c.most {
			return fmt.Errorf("a %T has more than %d elements", v, c.most)
		}
	}
	return m.UnmarshalVT(b.ReadOnlyData())
}

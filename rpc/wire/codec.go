// Package wire is how Weir's types become messages of gRPC, and messages bytes: conversions between limit's types and weir.v1, which
// both of its services and the client need, a codec that uses the marshalling generated for Weir's own messages, and the compact
// form that checks and decisions have in CheckStream.
//
// It keeps no state but that of one stream and decides nothing. What it does not promise: that text in a message is UTF-8,
// which the generated code does not look at; whoever uses a text checks it.
package wire

import (
	"strconv"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	// Registers gRPC's own codec, which carries what has no generated marshalling.
	standard "google.golang.org/grpc/encoding/proto"

	"github.com/weirlimit/weir/limit"
)

// Codec returns gRPC's codec "proto" with the marshalling that is generated for Weir's messages; other messages, such as
// those of the health service, take gRPC's own way. It is given to a connection (grpc.ForceCodecV2), and not registered, so that a program
// that links Weir's client keeps its own. The bytes are the same.
func Codec() encoding.CodecV2 { return newCodec() }

// ServerCodec is Codec for a server (grpc.ForceServerCodecV2), and for what a node receives from other nodes. It decodes no message that has
// more than so many parts: the error of Unmarshal is a *limit.Error. With a pool the bytes of all messages, small ones too, are from it; nil
// stands for one of its own.
func ServerCodec(pool mem.BufferPool, parts int) encoding.CodecV2 {
	c := newCodec()
	c.most = parts
	if pool != nil {
		c.pool, c.all = pool, true
	}
	return c
}

func newCodec() codec {
	// The sizes are powers of two, so that none takes more than twice what it needs: gRPC's own pool has none between 32 KiB and
	// 1 MiB, and sets to zero what it hands out, so that a message of 60 KB costs a megabyte of memory and of work.
	pool, err := mem.NewBinaryTieredBufferPool(10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23)
	if err != nil { // on machines whose words cannot count to 8 MiB
		pool = mem.DefaultBufferPool()
	}
	return codec{other: encoding.GetCodecV2(standard.Name), pool: pool}
}

type codec struct {
	other encoding.CodecV2
	pool  mem.BufferPool
	all   bool // messages are from the pool; otherwise small ones are not
	most  int  // parts of a message; 0: no bound
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
		return c.unmarshal(data, v)
	}
	lenient.Err = nil
	if lenient.Admit != nil {
		lenient.Err = lenient.Admit(data.Len())
	}
	if lenient.Err == nil {
		lenient.Err = c.unmarshal(data, lenient.Message)
	}
	return nil
}

func (c codec) unmarshal(data mem.BufferSlice, v any) error {
	m, generated := v.(message)
	many := c.most > 0 && data.Len() > c.most // no part takes less than a byte
	if !generated && !many {
		return c.other.Unmarshal(data, v)
	}
	b := data.MaterializeToBuffer(c.pool)
	defer b.Free() // what decodes copies what it keeps
	if p, ok := v.(proto.Message); ok && many && Parts(p.ProtoReflect().Descriptor(), b.ReadOnlyData(), c.most) > c.most {
		return limit.NewError(limit.TooLarge, "message", "has more than "+strconv.Itoa(c.most)+" elements of lists and maps, at all depths")
	}
	if !generated {
		return c.other.Unmarshal(mem.BufferSlice{b}, v)
	}
	if p, ok := v.(pooled); ok {
		p.ResetVT()
	} else {
		m.Reset()
	}
	return m.UnmarshalVT(b.ReadOnlyData())
}

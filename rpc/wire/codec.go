// Package wire converts Weir's types to gRPC messages, and messages to bytes. It has conversions between limit's types
// and weir.v1 for front end, peers and client; a codec that uses the marshalling generated for Weir's messages; and the
// compact form of checks and decisions in CheckStream.
//
// Its only state is that of one stream (Numbers, Targets). It does not promise that texts in a message are valid UTF-8,
// because the generated code does not check that: the users of a text do.
package wire

import (
	"strconv"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	// Registers gRPC's own codec, for messages without generated marshalling.
	standard "google.golang.org/grpc/encoding/proto"

	"github.com/weirlimit/weir/limit"
)

// Codec returns a replacement of gRPC's codec "proto" that uses the generated marshalling of Weir's messages. Other
// messages, such as those of the health service, go through gRPC's own codec. The bytes are the same. The codec is
// given to a connection (grpc.ForceCodecV2) and not registered, so that a program that links Weir's client keeps its
// own.
func Codec() encoding.CodecV2 { return newCodec() }

// ServerCodec is Codec for a server (grpc.ForceServerCodecV2) and for messages from other nodes. Unmarshal returns a
// *limit.Error for a message with more than parts parts (see Parts); 0: no bound. The codec takes the bytes of all
// messages from pool. With pool nil, it has a pool of its own and allocates small messages.
func ServerCodec(pool mem.BufferPool, parts int) encoding.CodecV2 {
	c := newCodec()
	c.most = parts
	if pool != nil {
		c.pool, c.all = pool, true
	}
	return c
}

func newCodec() codec {
	// The sizes are powers of two, so that no buffer is more than twice as large as its message. gRPC's default pool
	// has no size between 32 KiB and 1 MiB and clears the buffers that it hands out, so that a message of 60 KB costs a
	// megabyte of memory to allocate and clear.
	pool, err := mem.NewBinaryTieredBufferPool(10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23)
	if err != nil { // where int is too small for 8 MiB
		pool = mem.DefaultBufferPool()
	}
	return codec{other: encoding.GetCodecV2(standard.Name), pool: pool}
}

type codec struct {
	other encoding.CodecV2
	pool  mem.BufferPool
	all   bool // small messages are from the pool as well
	most  int  // bounds the parts of a message; 0: no bound
}

// message is a message with the code that vtprotobuf generates.
type message interface {
	marshaler
	Reset()
	UnmarshalVT([]byte) error
}

type marshaler interface {
	SizeVT() int
	MarshalToSizedBufferVT([]byte) (int, error)
}

// pooled is a message that ResetVT empties without giving up its memory.
type pooled interface {
	ResetVT()
}

// Recycled is a message whose memory is reused after it has been marshalled. The caller must not use it after Send.
type Recycled interface {
	Recycle()
}

// Pooled is a message with the pool that ServerCodec takes its bytes from, by one Get.
type Pooled interface {
	Pooled() (message any, pool mem.BufferPool)
}

// Lenient makes decoding of its Message succeed always: the codec puts the error into Err and does not return it,
// because gRPC would answer the call with INTERNAL.
type Lenient struct {
	Message proto.Message
	// Admit, when set, is called with the size of the encoded message in bytes before anything is decoded, and may
	// wait. When it returns an error, Err is set to that and nothing is decoded. Admit may set Message.
	Admit func(size int) error
	Err   error // from Admit or decoding; nil: Message is decoded
}

// Name implements encoding.CodecV2.
func (codec) Name() string { return standard.Name }

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	p, counted := v.(Pooled)
	if counted {
		v, c.pool = p.Pooled()
	}
	m, ok := v.(marshaler)
	if !ok && counted {
		m, ok = foreign{v.(proto.Message)}, true
	}
	if !ok {
		return c.other.Marshal(v)
	}
	if r, ok := v.(Recycled); ok {
		defer r.Recycle()
	}
	size := m.SizeVT()
	if !counted && !c.all && mem.IsBelowBufferPoolingThreshold(size) {
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

// foreign is a message without generated code.
type foreign struct{ proto.Message }

// SizeVT returns the size of the message.
func (f foreign) SizeVT() int { return proto.Size(f.Message) }

// MarshalToSizedBufferVT fills b.
func (f foreign) MarshalToSizedBufferVT(b []byte) (int, error) {
	out, err := proto.MarshalOptions{}.MarshalAppend(b[:0], f.Message)
	return len(out), err
}

// Unmarshal implements encoding.CodecV2. A pooled message is decoded into the memory that it has.
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
	many := c.most > 0 && data.Len() > c.most // each part takes at least a byte
	if !generated && !many {
		return c.other.Unmarshal(data, v)
	}
	b := data.MaterializeToBuffer(c.pool)
	defer b.Free() // decoding copies what a message keeps
	if p, ok := v.(proto.Message); ok && many &&
		Parts(p.ProtoReflect().Descriptor(), b.ReadOnlyData(), c.most) > c.most {
		return limit.NewError(limit.TooLarge, "message",
			"has more than "+strconv.Itoa(c.most)+" elements of lists and maps, at all depths")
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

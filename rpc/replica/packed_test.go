package replica

import (
	"bytes"
	"encoding/hex"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/cluster/ownership"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	"github.com/weirlimit/weir/rpc/transport"
)

// unpackAll returns what a run holds.
func unpackAll(data []byte) (list []ownership.Message, refused int, err error) {
	r := messageReader{partitions: testPartitions}
	refused, err = r.unpack(data, maxFrameMessages, func(m ownership.Message) { list = append(list, m) })
	return list, refused, err
}

// frequent makes messages of the kinds that can be packed, and some of them such that they cannot.
func frequent(rng *rand.Rand, n int) (list []ownership.Message) {
	term := ownership.Term{Epoch: 1, N: 5}
	for range n {
		var m ownership.Message
		switch rng.IntN(3) {
		case 0:
			r := &ownership.Replicate{Parts: 1}
			if rng.IntN(3) == 0 {
				fillMessage(rng, reflect.ValueOf(r).Elem(), true)
			}
			r.Partition, r.Sequence, r.Term, r.Sum = rng.IntN(testPartitions), rng.Uint64(), term, rng.Uint32()
			r.Chunk = make([]byte, []int{0, 1, 100, ownership.LightChunk, ownership.LightChunk + 1}[rng.IntN(5)])
			if len(r.Chunk) == 0 {
				r.Chunk = nil
			}
			for i := range r.Chunk {
				r.Chunk[i] = byte(rng.Uint32())
			}
			m = r
		case 1:
			m = &ownership.ReplicateAck{Partition: rng.IntN(testPartitions), Term: term, Sequence: 1<<63 | 3<<32 | uint64(rng.IntN(1000)), Outcome: ownership.Done}
		default:
			m = coreMessages()[rng.IntN(len(coreMessages()))]
			fillMessage(rng, reflect.ValueOf(m).Elem(), true)
		}
		if rng.IntN(4) == 0 {
			term.N += 1 << 16
		}
		list = append(list, m)
	}
	return list
}

// messagesAs are the messages of a frame, packed as they are sent or each by itself, as what cannot be packed is.
func messagesAs(list []ownership.Message, pack bool, room []byte) ([]*peerv1.Message, []byte) {
	if pack {
		return protoMessages(list, room)
	}
	return protoList(list, protoMessage), room
}

// TestPackedRoundTrip: a frame says the same, in the same order, whether what can be packed is or not; and is no larger than
// its weight.
func TestPackedRoundTrip(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	var room []byte
	packed := 0
	for range 300 {
		list := frequent(rng, rng.IntN(20))
		weighs := 0
		for _, m := range list {
			weighs += ownership.Weight(m)
		}
		for _, pack := range []bool{false, true} {
			frame := &peerv1.Frame{}
			frame.Messages, room = messagesAs(list, pack, room[:0])
			data, err := proto.Marshal(frame)
			if err != nil {
				t.Fatal(err)
			}
			var arrived peerv1.Frame
			if err := proto.Unmarshal(data, &arrived); err != nil {
				t.Fatal(err)
			}
			for _, m := range arrived.Messages {
				if len(m.GetPacked()) > 0 {
					packed++
				}
			}
			if got := messagesOf(t, &arrived); !reflect.DeepEqual(got, list) {
				t.Fatalf("packed %v:\nsent    %+v\narrived %+v", pack, list, got)
			}
			if len(data) > weighs {
				t.Fatalf("packed %v: %d bytes of a weight of %d", pack, len(data), weighs)
			}
		}
	}
	if packed == 0 {
		t.Error("nothing was packed")
	}
}

// TestPackedBytes: the format is what nodes of other builds read.
func TestPackedBytes(t *testing.T) {
	held := ownership.Term{N: 1<<16 | 0xabcd}
	raised := ownership.Term{Epoch: 2, N: 2<<16 | 0xabcd}
	list := []ownership.Message{
		&ownership.Replicate{Partition: 3, Term: held, Sequence: 1<<63 | 1<<32 | 7, Parts: 1, Chunk: []byte("ch"), Sum: 0x01020304},
		&ownership.Replicate{Partition: 4, Term: held, Sequence: 2<<32 | 300, Begin: true, Complete: true, Part: 1, Parts: 2},
		&ownership.ReplicateAck{Partition: 5, Term: held, Sequence: 1<<63 | 1<<32 | 8, Outcome: ownership.Done},
		&ownership.ReplicateAck{Partition: 6, Term: raised, Sequence: 9, Outcome: ownership.Done},
	}
	want := "0202" + // two and two
		"0203" + "00cdd706" + "0307" + "026368" + "04030201" +
		"1c04" + "04ac02" + "0102" + "00" + "00000000" +
		"0105" + "0308" +
		"0306" + "02cdd70a" + "0009"
	data := appendPacked(nil, list)
	if got := hex.EncodeToString(data); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	got, refused, err := unpackAll(data)
	if refused != 0 || err != nil || !reflect.DeepEqual(got, list) {
		t.Errorf("%+v, %d, %v", got, refused, err)
	}
}

func TestPackable(t *testing.T) {
	for want, list := range map[bool][]ownership.Message{
		true: {
			&ownership.Replicate{}, &ownership.Replicate{Chunk: make([]byte, ownership.LightChunk)}, &ownership.ReplicateAck{Outcome: ownership.Done},
		},
		false: {
			&ownership.Replicate{Chunk: make([]byte, ownership.LightChunk+1)}, &ownership.ReplicateAck{Outcome: ownership.Again},
			&ownership.ReplicateAck{Outcome: ownership.Done, Known: ownership.Term{N: 1}},
			&ownership.ReplicateAck{Outcome: ownership.Done, Holder: ownership.Node{Name: "n"}},
			&ownership.Commit{}, &ownership.Query{},
		},
	} {
		for _, m := range list {
			if packable(m) != want {
				t.Errorf("%+v: %v", m, !want)
			}
		}
	}
}

// TestPackedRefused: what makes no sense is refused with the field that is wrong, and takes nothing else along that can still
// be told apart.
func TestPackedRefused(t *testing.T) {
	good := &ownership.ReplicateAck{Partition: 6, Term: ownership.Term{N: 1}, Sequence: 1, Outcome: ownership.Done}
	far := &ownership.ReplicateAck{Partition: 7, Sequence: 1, Outcome: ownership.Done}
	pieces := func(part, parts int) ownership.Message {
		return &ownership.Replicate{Part: part, Parts: parts, Chunk: []byte("c")}
	}
	after := func(list ...ownership.Message) []byte {
		return appendPacked(nil, slices.Concat([]ownership.Message{good}, list, []ownership.Message{good}))
	}
	whole := appendPacked(nil, []ownership.Message{good, pieces(0, 1)})
	huge := bytes.Repeat([]byte{0xff}, 9)
	huge = append(huge, 1)
	for _, c := range []struct {
		says          string
		data          []byte
		kept, refused int
	}{
		{"packed: malformed", nil, 0, 1},
		{"packed: malformed", []byte{1}, 0, 1},
		{"packed: malformed", huge, 0, 1},
		{"packed: 4097 messages, more than a frame holds", append([]byte{0x80, 0x20, 1}, make([]byte, 1<<20)...), 0, 1},
		{"packed: malformed: 8 bytes are too few for 1 messages", append([]byte{1, 0}, make([]byte, 8)...), 0, 1},
		{"packed: malformed: 3 bytes are too few for 1 messages", append([]byte{0, 1}, make([]byte, 3)...), 0, 1},
		{"packed: malformed", []byte{0, 1, 0x20, 0, 0, 0}, 0, 1},
		{"packed: malformed", []byte{0, 1, packedAck | packedBegin, 0, 0, 0}, 0, 1},
		{"packed: malformed", slices.Concat([]byte{0, 1, packedAck}, huge, make([]byte, 2)), 0, 1},
		{"packed: malformed", slices.Concat([]byte{0, 1, packedAck | packedTerm, 0}, bytes.Repeat([]byte{0xff}, 11)), 0, 1},
		{"packed: malformed", []byte{0, 1, packedAck | packedTerm, 0, 0, 0x80}, 0, 1},
		{"packed: malformed", []byte{0, 1, packedAck, 0, 0x80, 0x80, 0x80, 0x80, 0x10, 0}, 0, 1},
		{"packed: malformed", []byte{1, 0, packedAck, 0, 0, 0, 0, 0, 0, 0, 0}, 0, 1},
		{"packed: malformed", append([]byte{0, 3}, make([]byte, 12)...), 0, 1},
		{"packed: malformed", append([]byte{1, 0, 0, 0, 0, 0, 0x81, 0x20}, make([]byte, ownership.LightChunk+9)...), 0, 1},
		{"packed: malformed", append([]byte{1, 0, 0, 0, 0, 0, 6}, make([]byte, 5)...), 0, 1},
		{"packed: malformed", append([]byte{1, 0, 0, 0, 0, 0, 3}, make([]byte, 5)...), 0, 1},
		{"packed: malformed: 1 bytes after the last message", append(slices.Clone(whole), 0), 2, 1},
		{"packed: malformed", whole[:len(whole)-1], 1, 1},
		{"replicate_ack.partition: 7 is not one of 7 partitions", after(far), 2, 1},
		{"replicate_ack.partition: 7 is not one of 7 partitions", after(far, far), 2, 2},
		{"replicate.parts: must be 1 to 4096, not 4097", after(pieces(0, maxParts+1)), 2, 1},
		{"replicate.parts: must be 1 to 4096, not 0", after(pieces(0, 0)), 2, 1},
		{"replicate.part: 2 is not one of 2", after(pieces(2, 2)), 2, 1},
	} {
		kept, refused, err := unpackAll(c.data)
		if err == nil || !strings.HasPrefix(err.Error(), c.says) || len(kept) != c.kept || refused != c.refused {
			t.Errorf("want %q, %d kept and %d refused: got %v, %d and %d", c.says, c.kept, c.refused, err, len(kept), refused)
		}
		for _, m := range kept[:min(len(kept), 1)] {
			if !reflect.DeepEqual(m, good) && !reflect.DeepEqual(m, pieces(0, 1)) {
				t.Errorf("after %q: %+v", c.says, m)
			}
		}
	}
	// What a frame holds beside counts as well.
	r := messageReader{partitions: testPartitions}
	if n, err := r.unpack(after(), 1, func(m ownership.Message) { t.Errorf("%+v", m) }); n != 1 || err == nil {
		t.Errorf("%d, %v", n, err)
	}
}

func FuzzPacked(f *testing.F) {
	rng := rand.New(rand.NewPCG(9, 10))
	for range 20 {
		list := slices.DeleteFunc(frequent(rng, 8), func(m ownership.Message) bool { return !packable(m) })
		f.Add(appendPacked(nil, list))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		before := slices.Clone(data)
		list, refused, err := unpackAll(data)
		if (err == nil) != (refused == 0) {
			t.Errorf("%d refused, %v", refused, err)
		}
		if !bytes.Equal(data, before) {
			t.Error("reading changed the bytes")
		}
		size := 0
		for _, m := range list {
			checkMessage(t, "message", reflect.ValueOf(m))
			if !packable(m) {
				t.Errorf("%+v cannot have been packed", m)
			}
			if r, ok := m.(*ownership.Replicate); ok {
				size += len(r.Chunk)
			}
		}
		if size > len(data) || len(list) > len(data)/leastAck {
			t.Errorf("%d bytes in %d messages of %d bytes", size, len(list), len(data))
		}
		again, refused, err := unpackAll(appendPacked(nil, list))
		if refused != 0 || err != nil || !reflect.DeepEqual(again, list) {
			t.Errorf("read %+v\nthen %+v, %v", list, again, err)
		}
	})
}

// BenchmarkFrame is a frame of 500 messages of each kind, from messages to bytes and back: ns a message.
func BenchmarkFrame(b *testing.B) {
	const each = 500
	var list []ownership.Message
	for i := range each {
		term := ownership.Term{N: uint64(1+i/100)<<16 | 0xabcd}
		sequence := uint64(1)<<63 | 1<<32 | uint64(i)
		list = append(list,
			&ownership.Replicate{Partition: i % testPartitions, Term: term, Sequence: sequence, Parts: 1, Chunk: make([]byte, 80)},
			&ownership.ReplicateAck{Partition: i % testPartitions, Term: term, Sequence: sequence, Outcome: ownership.Done})
	}
	for name, pack := range map[string]bool{"packed": true, "apart": false} {
		b.Run(name, func(b *testing.B) {
			m := &Messenger{cfg: MessengerConfig{Config: transport.Config{Self: bob}, Receive: func([]ownership.Envelope) {}}}
			in := intake{m: m, r: messageReader{partitions: testPartitions}}
			var room []byte
			var size int
			b.ReportAllocs()
			for b.Loop() {
				frame := &peerv1.Frame{}
				frame.Messages, room = messagesAs(list, pack, room[:0])
				data, err := frame.MarshalVT()
				if err != nil {
					b.Fatal(err)
				}
				size = len(data)
				var arrived peerv1.Frame
				if err := arrived.UnmarshalVT(data); err != nil {
					b.Fatal(err)
				}
				in.take(&arrived)
			}
			if n := m.received.Load(); n != uint64(b.N)*2*each {
				b.Fatalf("%d arrived", n)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/(2*each), "ns/message")
			b.ReportMetric(float64(size)/(2*each), "bytes/message")
		})
	}
}

package replica

import (
	"errors"

	"github.com/weirlimit/weir/cluster/ownership"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
)

// AppendFrame appends messages as a Messenger sends them in one frame: a peer.v1 Frame. It is for tests that carry messages themselves; ReadFrame is the other end.
func AppendFrame(to []byte, msgs []ownership.Message) ([]byte, error) {
	frame := &peerv1.Frame{Messages: protoList(msgs, protoMessage)}
	data, err := frame.MarshalVT()
	return append(to, data...), err
}

// ReadFrame reads what AppendFrame has made, as a Messenger of a cluster with that many partitions takes it in. The error is that
// of the first message that is rejected.
func ReadFrame(data []byte, partitions int) (msgs []ownership.Message, err error) {
	frame := &peerv1.Frame{}
	if err := frame.UnmarshalVT(data); err != nil {
		return nil, err
	}
	r := messageReader{partitions: partitions}
	r.frame(frame, func(m ownership.Message) { msgs = append(msgs, m) }, func(refused error) { err = errors.Join(err, refused) })
	return msgs, err
}

// frame reads the messages of a frame. refuse is called for each that is dropped: the others may be all right, and be waited for.
func (r *messageReader) frame(frame *peerv1.Frame, add func(ownership.Message), refuse func(error)) {
	for _, msg := range frame.Messages {
		if got, err := r.read(msg); err != nil {
			refuse(err)
		} else {
			add(got)
		}
	}
}

-- A ledger as version 576e67f wrote it: see test_older_ledger.py.
PRAGMA application_id=1735423312;
PRAGMA user_version=1;
BEGIN TRANSACTION;
CREATE TABLE gpus (
    gpu_id TEXT PRIMARY KEY, endpoint_id TEXT NOT NULL,
    last_fence INTEGER NOT NULL, freed_at REAL, read_after REAL, revision INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO "gpus" VALUES('0','',1,NULL,NULL,2);
INSERT INTO "gpus" VALUES('1','',2,NULL,NULL,3);
INSERT INTO "gpus" VALUES('2','',3,1000.0,NULL,10);
INSERT INTO "gpus" VALUES('3','',4,1000.0,1000.0,9);
CREATE TABLE meta (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    revision INTEGER NOT NULL, fence INTEGER NOT NULL, ticket INTEGER NOT NULL,
    boot_id TEXT NOT NULL, now REAL, tally TEXT NOT NULL, forgotten INTEGER NOT NULL, secret TEXT NOT NULL
) STRICT;
INSERT INTO "meta" VALUES(1,50,4,7,'first-boot',1065.0,'{"cancelled":1,"released":1}',0,'ef9b55aad7a094665c3957398c753d7d');
CREATE TABLE promised (
    gpu_id TEXT NOT NULL, lease_id TEXT NOT NULL, is_shared INTEGER NOT NULL, PRIMARY KEY (gpu_id, lease_id)
) STRICT, WITHOUT ROWID;
INSERT INTO "promised" VALUES('0','lease-1',0);
INSERT INTO "promised" VALUES('1','lease-2',1);
INSERT INTO "promised" VALUES('2','lease-3',0);
CREATE TABLE requests (
    request_id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL, lease_id TEXT, ended_at REAL, revision INTEGER NOT NULL, data TEXT NOT NULL
) STRICT;
INSERT INTO "requests" VALUES('holds','lease','lease-1',NULL,48,'{"lease_id":"lease-1","request":{"request_id":"holds","wishes":{"count":1,"memory_mb":null,"share":false,"min_free_memory_mb":null,"gpu_model":null,"only":null,"exclude":[],"policy":"thresholds","memory_threshold":null,"utilization_threshold":null,"priority":0},"worker_id":"worker-holds","owner":"me","label":"training","ttl_seconds":60.0,"account":"user:1000","process":""},"endpoint_id":"","gpu_ids":["0"],"held":[{"gpu_id":"0","index":0,"uuid":"GPU-host-0","name":"NVIDIA H100 80GB HBM3","memory_used_mb":0.0,"memory_usage_percent":0.0,"processes":[]}],"fence":1,"state":"held","requested_at":1000.0,"granted_at":1000.0,"expires_at":1125.0,"quarantine":null,"ask":""}');
INSERT INTO "requests" VALUES('shares','lease','lease-2',NULL,49,'{"lease_id":"lease-2","request":{"request_id":"shares","wishes":{"count":1,"memory_mb":10000.0,"share":true,"min_free_memory_mb":null,"gpu_model":null,"only":null,"exclude":[],"policy":"thresholds","memory_threshold":null,"utilization_threshold":null,"priority":0},"worker_id":"worker-shares","owner":"me","label":"training","ttl_seconds":60.0,"account":"user:1000","process":""},"endpoint_id":"","gpu_ids":["1"],"held":[{"gpu_id":"1","index":1,"uuid":"GPU-host-1","name":"NVIDIA H100 80GB HBM3","memory_used_mb":0.0,"memory_usage_percent":0.0,"processes":[]}],"fence":2,"state":"held","requested_at":1000.0,"granted_at":1000.0,"expires_at":1125.0,"quarantine":null,"ask":""}');
INSERT INTO "requests" VALUES('dies','lease','lease-3',NULL,10,'{"lease_id":"lease-3","request":{"request_id":"dies","wishes":{"count":1,"memory_mb":null,"share":false,"min_free_memory_mb":null,"gpu_model":"H100","only":null,"exclude":[],"policy":"thresholds","memory_threshold":null,"utilization_threshold":null,"priority":0},"worker_id":"worker-dies","owner":"me","label":"training","ttl_seconds":60.0,"account":"user:1000","process":""},"endpoint_id":"","gpu_ids":["2"],"held":[{"gpu_id":"2","index":2,"uuid":"GPU-host-2","name":"NVIDIA H100 80GB HBM3","memory_used_mb":0.0,"memory_usage_percent":0.0,"processes":[]}],"fence":3,"state":"quarantined","requested_at":1000.0,"granted_at":1000.0,"expires_at":1060.0,"quarantine":{"reason":"its holder is gone","since":1000.0,"until":1005.0},"ask":"poll-dies"}');
INSERT INTO "requests" VALUES('released','outcome','lease-4',1000.0,9,'{"request":{"request_id":"released","wishes":{"count":1,"memory_mb":null,"share":false,"min_free_memory_mb":null,"gpu_model":null,"only":null,"exclude":[],"policy":"thresholds","memory_threshold":null,"utilization_threshold":null,"priority":0},"worker_id":"worker-released","owner":"me","label":"training","ttl_seconds":60.0,"account":"user:1000","process":""},"state":"granted","at":1000.0,"reasons":[],"lease":{"lease_id":"lease-4","request":{"request_id":"released","wishes":{"count":1,"memory_mb":null,"share":false,"min_free_memory_mb":null,"gpu_model":null,"only":null,"exclude":[],"policy":"thresholds","memory_threshold":null,"utilization_threshold":null,"priority":0},"worker_id":"worker-released","owner":"me","label":"training","ttl_seconds":60.0,"account":"user:1000","process":""},"endpoint_id":"","gpu_ids":["3"],"held":[{"gpu_id":"3","index":3,"uuid":"GPU-host-3","name":"NVIDIA H100 80GB HBM3","memory_used_mb":0.0,"memory_usage_percent":0.0,"processes":[]}],"fence":4,"state":"held","requested_at":1000.0,"granted_at":1000.0,"expires_at":1060.0,"quarantine":null,"ask":"poll-released"},"lease_state":"released"}');
INSERT INTO "requests" VALUES('many','waiter',NULL,NULL,50,'{"request":{"request_id":"many","wishes":{"count":2,"memory_mb":null,"share":false,"min_free_memory_mb":null,"gpu_model":null,"only":null,"exclude":[],"policy":"thresholds","memory_threshold":null,"utilization_threshold":null,"priority":0},"worker_id":"worker-many","owner":"me","label":"training","ttl_seconds":60.0,"account":"user:1000","process":""},"ticket":5,"enqueued_at":1000.0,"deadline":null,"asking_until":1080.0,"gives_up_at":1110.0,"may_keep":true,"ask":"poll-many","kept":["3","1"],"kept_at":1065.0,"state":"waiting"}');
INSERT INTO "requests" VALUES('gone','outcome',NULL,1000.0,8,'{"request":{"request_id":"gone","wishes":{"count":1,"memory_mb":null,"share":false,"min_free_memory_mb":null,"gpu_model":null,"only":["0"],"exclude":[],"policy":"thresholds","memory_threshold":null,"utilization_threshold":null,"priority":0},"worker_id":"worker-gone","owner":"me","label":"training","ttl_seconds":60.0,"account":"user:1000","process":""},"state":"cancelled","at":1000.0,"reasons":[],"lease":null,"lease_state":null}');
INSERT INTO "requests" VALUES('later','waiter',NULL,NULL,50,'{"request":{"request_id":"later","wishes":{"count":1,"memory_mb":null,"share":false,"min_free_memory_mb":null,"gpu_model":null,"only":null,"exclude":[],"policy":"thresholds","memory_threshold":null,"utilization_threshold":null,"priority":0},"worker_id":"worker-later","owner":"me","label":"training","ttl_seconds":60.0,"account":"user:1000","process":""},"ticket":7,"enqueued_at":1065.0,"deadline":null,"asking_until":1085.0,"gives_up_at":1115.0,"may_keep":false,"ask":"poll-later","kept":[],"kept_at":null,"state":"waiting"}');
CREATE INDEX changed ON requests (revision);
CREATE UNIQUE INDEX leased ON requests (lease_id) WHERE lease_id IS NOT NULL;
CREATE INDEX ended ON requests (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX live ON requests (kind) WHERE ended_at IS NULL;
CREATE UNIQUE INDEX promised_to_one ON promised (gpu_id) WHERE is_shared = 0;
CREATE INDEX promised_by ON promised (lease_id);
CREATE TRIGGER promised_twice BEFORE INSERT ON promised
WHEN EXISTS (SELECT 1 FROM promised WHERE gpu_id = new.gpu_id AND (is_shared = 0 OR new.is_shared = 0))
BEGIN SELECT RAISE(ABORT, 'this GPU is promised already'); END;
COMMIT;
